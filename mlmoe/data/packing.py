"""Documents to rows of `length` = context + 1 tokens.

Each of `bins` rows under construction is fed by its own run of documents (a lane), so that
neighbouring rows come from different documents; otherwise a batch of short rows would be one
long file. Two ways to fill a row:

* 'split': a lane's documents one after another; whatever does not fit goes on in the lane's
  next row. No padding.
* 'best_fit': pieces of at most one row, each into the fullest row that still has room; when
  a piece fits in none of the `bins` rows they are all given out. Documents that fit in a row
  stay whole; the price is padding.

Where a document goes on in another row the last token is repeated there, so that every token
but the first of a document is a target exactly once; its positions start again at 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from mlmoe.data.batch import Batch
from mlmoe.errors import UserError


class Row(NamedTuple):
    """[length] int32 tokens and segment ids (1, 2, ... in a row; 0 is padding)."""

    tokens: np.ndarray
    segments: np.ndarray


def to_batch(rows: Sequence[Row]) -> Batch:
    """Rows of T + 1 tokens to inputs, targets, segments, positions, weights, each [B, T]."""
    tokens = np.stack([row.tokens for row in rows])
    segments = np.stack([row.segments for row in rows])
    index = np.arange(tokens.shape[1], dtype=np.int32)[None, :]
    new = np.diff(segments, axis=1, prepend=-1) != 0
    positions = np.where(segments > 0, index - np.maximum.accumulate(index * new, axis=1), 0)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return Batch(
        tokens_BT=tokens[:, :-1],
        targets_BT=tokens[:, 1:],
        segment_ids_BT=segments[:, :-1],
        positions_BT=positions[:, :-1],
        weights_BT=same.astype(np.float32),
    )


class OpenRows:
    """`bins` rows being filled side by side."""

    def __init__(self, bins: int, length: int):
        self.tokens = np.zeros((bins, length), np.int32)
        self.segments = np.zeros((bins, length), np.int32)
        self.used = np.zeros(bins, np.int64)
        self._count = np.zeros(bins, np.int32)

    def best_fit(self, size: int) -> int:
        """The row with the least room that still holds `size` tokens, or -1."""
        room = self.tokens.shape[1] - self.used
        row = int(np.argmin(np.where(room >= size, room, np.iinfo(np.int64).max)))
        return row if room[row] >= size else -1

    def put(self, row: int, piece: np.ndarray) -> None:
        start, end = self.used[row], self.used[row] + len(piece)
        self._count[row] += 1
        self.tokens[row, start:end] = piece
        self.segments[row, start:end] = self._count[row]
        self.used[row] = end

    def row(self, row: int) -> Row:
        return Row(self.tokens[row], self.segments[row])


class PackedRows(grain.IterDataset[Row]):
    """An endless run of rows from an endless, random-access run of token arrays."""

    def __init__(
        self,
        documents: grain.MapDataset[np.ndarray],
        *,
        packing: str,
        bins: int,
        length: int,
        give_up: int,
        read_threads: int,
    ):
        """`give_up`: empty documents in a row after which the corpus counts as empty."""
        super().__init__(documents)
        self._iterator = {"split": _SplitIterator, "best_fit": _BestFitIterator}[packing]
        self._bins, self._length, self._give_up = bins, length, give_up
        self._read = grain.ReadOptions(
            num_threads=read_threads, prefetch_buffer_size=4 * read_threads
        )

    def __iter__(self) -> "_LaneIterator":
        documents = self._parent
        stream = iter(documents.to_iter_dataset(self._read))
        return self._iterator(documents, stream, self._bins, self._length, self._give_up)


class _LaneIterator(grain.DatasetIterator[Row]):
    """The lanes: which document each is in, and how far."""

    def __init__(
        self,
        documents: grain.MapDataset[np.ndarray],
        stream: grain.DatasetIterator[np.ndarray],
        bins: int,
        length: int,
        give_up: int,
    ):
        super().__init__(stream)
        self._documents, self._stream = documents, stream
        self._bins, self._length, self._give_up = bins, length, give_up
        self._restore({"next": 0, "turn": 0, "lanes": [[-1, 0]] * bins})

    def get_state(self) -> dict[str, Any]:
        return self._snapshot()

    def set_state(self, state: dict[str, Any]) -> None:
        self._restore(state)

    def _snapshot(self) -> dict[str, Any]:
        """Documents taken so far, pieces taken so far, and (document, offset) of each lane."""
        return {"next": self._next, "turn": self._turn, "lanes": [list(x) for x in self._lanes]}

    def _restore(self, state: dict[str, Any]) -> None:
        self._next, self._turn = state["next"], state["turn"]
        self._lanes = [list(lane) for lane in state["lanes"]]
        self._texts: list[np.ndarray | None] = [None] * self._bins
        for lane, (document, _) in enumerate(self._lanes):
            if document >= 0:
                self._texts[lane] = self._documents[document]
        grain.experimental.set_next_index(self._stream, self._next)

    def _rest(self, lane: int) -> np.ndarray:
        """What is left of the lane's document, or the next one of the stream."""
        for _ in range(self._give_up):
            tokens = self._texts[lane]
            if tokens is not None:
                return tokens[self._lanes[lane][1] :]
            document = next(self._stream)
            if len(document):
                self._texts[lane], self._lanes[lane] = document, [self._next, 0]
            self._next += 1
        raise UserError(f"no usable document among {self._give_up - 1:,} read one after another")

    def _take(self, lane: int, size: int) -> None:
        """Moves the lane on by `size` tokens, less the one that is repeated where it goes on."""
        tokens, (document, offset) = self._texts[lane], self._lanes[lane]
        assert tokens is not None
        if offset + size >= len(tokens):
            self._texts[lane], self._lanes[lane] = None, [-1, 0]
        else:
            self._lanes[lane] = [document, offset + size - 1]


class _SplitIterator(_LaneIterator):
    def __next__(self) -> Row:
        lane, row = self._turn % self._bins, OpenRows(1, self._length)
        while (room := self._length - int(row.used[0])) > 0:
            piece = self._rest(lane)[:room]
            row.put(0, piece)
            self._take(lane, len(piece))
        self._turn += 1
        return row.row(0)


class _BestFitIterator(_LaneIterator):
    """The state is the lanes before the current group of rows, and the rows given out of it."""

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        self._group: list[Row] = []
        self._group_start, self._given = self._snapshot(), 0

    def _fill(self) -> list[Row]:
        rows = OpenRows(self._bins, self._length)
        while True:
            lane = self._turn % self._bins
            piece = self._rest(lane)[: self._length]
            row = rows.best_fit(len(piece))
            if row < 0:
                return [rows.row(r) for r in range(self._bins)]
            rows.put(row, piece)
            self._take(lane, len(piece))
            self._turn += 1

    def __next__(self) -> Row:
        if self._given == len(self._group):
            self._group_start, self._given = self._snapshot(), 0
            self._group = self._fill()
        self._given += 1
        return self._group[self._given - 1]

    def get_state(self) -> dict[str, Any]:
        return {**self._group_start, "given": self._given}

    def set_state(self, state: dict[str, Any]) -> None:
        self._restore(state)
        if state["given"]:
            self._group, self._given = self._fill(), state["given"]
