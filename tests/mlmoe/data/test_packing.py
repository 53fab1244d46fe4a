"""Packing invariants over documents of every awkward length, against a slow oracle."""

import itertools
from collections import Counter

import grain
import numpy as np
import pytest

from mlmoe.data.packing import OpenRows, PackedRows, Row, to_batch

LENGTH = 9  # tokens a row
# Empty; shorter, as long as and longer than a row by one; the length at which the shared token
# matters (2 * LENGTH - 1 fills two rows); ten rows.
LENGTHS = (0, 3, 4, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH - 1, 2 * LENGTH, 10 * LENGTH)


def _documents(seed, count=40):
    """Documents whose tokens are all different: document d holds d * 1000 + (0, 1, 2, ...)."""
    sizes = np.random.default_rng(seed).choice(LENGTHS, size=count)
    return [np.arange(n, dtype=np.int32) + 1000 * (d + 1) for d, n in enumerate(sizes)]


def _rows(documents, packing, bins=4):
    return PackedRows(
        grain.MapDataset.source(documents).repeat(),
        packing=packing,
        bins=bins,
        length=LENGTH,
        give_up=100,
        read_threads=0,
    )


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("bins", [1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_token_but_the_first_is_a_target_exactly_once(packing, bins, seed):
    documents = _documents(seed, count=100)  # more than the 80 rows below can hold
    batch = to_batch(list(itertools.islice(_rows(documents, packing, bins), 80)))
    counted = batch.weights_BT > 0
    assert np.array_equal(batch.targets_BT[counted], batch.tokens_BT[counted] + 1)
    counts = Counter(batch.targets_BT[counted].tolist())
    assert set(counts.values()) == {1}
    begun = [d for d in documents if len(d) and int(d[1]) in counts]
    unfinished = [d for d in begun if any(int(t) not in counts for t in d[1:])]
    assert len(begun) > 15 and len(unfinished) <= bins  # at most one a lane
    for document in unfinished:  # and what is there of it has no gap
        there = [int(t) in counts for t in document[1:]]
        assert there == sorted(there, reverse=True)
    passed_over = [d for d in documents[: len(begun)] if len(d) and int(d[1]) not in counts]
    assert len(passed_over) <= bins


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_fields_of_a_row(packing, seed):
    rows = list(itertools.islice(_rows(_documents(seed), packing), 120))
    batch = to_batch(rows)
    for name, array in batch._asdict().items():
        assert array.shape == (120, LENGTH - 1), name
        assert array.dtype == (np.float32 if name == "weights_BT" else np.int32), name
    for r, row in enumerate(rows):
        segments, tokens = row.segments, row.tokens
        padding = segments == 0
        assert not padding.any() or padding[np.argmax(padding) :].all()  # only at the end
        assert np.all(tokens[padding] == 0)
        real = segments[~padding]
        assert real[0] == 1 and set(np.diff(real)) <= {0, 1}  # no id is skipped
        for segment in np.unique(real):
            piece = tokens[segments == segment]
            assert np.all(np.diff(piece) == 1)  # one stretch of one document
            positions = batch.positions_BT[r][segments[:-1] == segment]
            assert np.array_equal(positions, np.arange(len(positions)))
        assert batch.weights_BT[r].sum() > 0
    oracle = (batch.tokens_BT + 1 == batch.targets_BT) & (batch.tokens_BT > 0)
    assert np.array_equal(batch.weights_BT > 0, oracle)


def test_split_has_no_padding():
    rows = itertools.islice(_rows(_documents(3), "split"), 100)
    assert all((row.segments > 0).all() for row in rows)


def test_best_fit_keeps_documents_whole_where_they_fit():
    documents = _documents(4)
    first = {int(d[0]): len(d) for d in documents if len(d)}
    for row in itertools.islice(_rows(documents, "best_fit"), 200):
        for segment in range(1, row.segments.max() + 1):
            piece = row.tokens[row.segments == segment]
            size = first.get(int(piece[0]))
            if size is not None and size <= LENGTH:
                assert len(piece) == size
            assert len(piece) >= 2  # a piece of one token holds no target


def test_best_fit_wastes_less_with_more_open_rows():
    sizes = np.random.default_rng(0).integers(2, LENGTH + 1, size=500)
    documents = [np.ones(n, np.int32) for n in sizes]

    def fill(bins):
        rows = list(itertools.islice(_rows(documents, "best_fit", bins), 320))
        return np.mean([row.segments > 0 for row in rows])

    assert fill(1) < fill(8) < fill(32) and fill(32) > 0.9


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_rows_side_by_side_come_from_different_documents(packing):
    """One long document must not fill a whole batch."""
    documents = [np.full(50 * LENGTH, d, np.int32) for d in range(1, 9)]
    rows = list(itertools.islice(_rows(documents, packing, bins=4), 40))
    for first in range(0, 40, 4):
        assert len({int(row.tokens[0]) for row in rows[first : first + 4]}) == 4


def test_best_fit_chooses_the_fullest_row_that_has_room():
    rows = OpenRows(4, 10)
    rows.used[:] = [1, 6, 8, 5]
    assert [rows.best_fit(n) for n in (1, 2, 3, 5, 6, 10)] == [2, 2, 1, 3, 0, -1]


def test_segments_restart_in_every_row():
    rows = OpenRows(2, 4)
    for piece in ([1, 2], [3]):
        rows.put(0, np.array(piece, np.int32))
    rows.put(1, np.array([7], np.int32))
    assert rows.row(0).segments.tolist() == [1, 1, 2, 0]
    assert rows.row(1).segments.tolist() == [1, 0, 0, 0]


def test_to_batch_by_hand():
    tokens, segments = [5, 6, 7, 8, 9, 0], [1, 1, 1, 2, 2, 0]
    batch = to_batch([Row(np.array(tokens, np.int32), np.array(segments, np.int32))])
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.targets_BT.tolist() == [[6, 7, 8, 9, 0]]
    assert batch.segment_ids_BT.tolist() == [[1, 1, 1, 2, 2]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.weights_BT.tolist() == [[1, 1, 0, 1, 0]]


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("bins", [1, 3])
def test_restoring_at_every_row_continues_bit_for_bit(packing, bins):
    """Over more than two epochs of 12 documents, and the states all have one shape."""
    rows = _rows(_documents(5, count=12), packing, bins)
    rows = grain.experimental.LimitIterDataset(rows, 60)
    grain.experimental.assert_equal_output_after_checkpoint(rows)
