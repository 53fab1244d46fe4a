"""Token ids in a flat binary file as documents: the source 'bin' (one stream, memory-mapped)."""

from bisect import bisect_right
from pathlib import Path

import numpy as np

from mlmoe.data.documents import BadDocument, BadDocuments, row_keys
from mlmoe.data.files import find_files
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError

_CHUNK = 2**24
_SPAN = 2**14  # tokens a document where the stream holds no end-of-document id


class TokenFiles:
    """Documents are the ids between two `eos_id`, or spans of 16,384 ids where there is none."""

    split_by_name = False

    def __init__(self, path: str, dtype: str, tokenizer: Tokenizer, bad: BadDocuments):
        if tokenizer.vocab_size > np.iinfo(dtype).max + 1:
            message = f"data.bin_dtype={dtype!r} cannot hold a vocabulary of"
            raise UserError(f"{message} {tokenizer.vocab_size:,}; nearest valid: 'uint32'")
        root, self._names = find_files(path, (".bin",))
        self._bos_id = tokenizer.bos_id
        self._streams: list[np.ndarray] = []
        self._spans: list[np.ndarray] = []  # a file: [documents, 2] start, end
        for name in self._names:
            stream = _map(root / name, dtype)
            self._streams.append(stream)
            self._spans.append(_split(stream, name, tokenizer))
            if not len(stream):
                bad.report(BadDocument("file without rows", f"{name}: the file is empty"))
        self._ends = np.cumsum([len(spans) for spans in self._spans]).tolist()
        self.files = tuple((name, (root / name).stat().st_size) for name in self._names)
        self.n_bytes = sum(size for _, size in self.files)

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[int, np.ndarray]:
        file = bisect_right(self._ends, index)
        return file, self._spans[file][index - self._ends[file]]

    def __getitem__(self, index: int) -> np.ndarray:
        file, (start, end) = self._locate(index)
        ids = self._streams[file][start:end].astype(np.int32)
        return ids[1:] if len(ids) and ids[0] == self._bos_id else ids

    def name(self, index: int) -> str:
        file, (start, _) = self._locate(index)
        return f"{self._names[file]}:token {start}"

    def keys(self) -> np.ndarray:
        counts = [len(spans) for spans in self._spans]
        return row_keys(list(zip(self._names, counts, strict=True)))

    def sizes(self) -> np.ndarray:
        return np.concatenate([spans[:, 1] - spans[:, 0] for spans in self._spans])


def _map(path: Path, dtype: str) -> np.ndarray:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        message = f"{path}: {size:,} bytes is no whole number of {dtype} ids ({width} bytes each)"
        raise UserError(f"{message}; the file is truncated or data.bin_dtype is wrong")
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)


def _split(stream: np.ndarray, name: str, tokenizer: Tokenizer) -> np.ndarray:
    """One pass over the ids: checks them against the vocabulary and finds the documents."""
    ends = []
    for first in range(0, len(stream), _CHUNK):
        chunk = stream[first : first + _CHUNK]
        if chunk.max() >= tokenizer.vocab_size:
            where = first + int(np.argmax(chunk >= tokenizer.vocab_size))
            message = f"{name}: id {stream[where]} at token {where} is outside the tokenizer's"
            raise UserError(
                f"{message} vocabulary of {tokenizer.vocab_size:,}; check data.bin_dtype "
                "and data.tokenizer"
            )
        ends.append(np.flatnonzero(chunk == tokenizer.eos_id) + first)
    found = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    if not len(found):
        starts = np.arange(0, len(stream), _SPAN)
        return np.stack([starts, np.minimum(starts + _SPAN, len(stream))], axis=1)
    starts = np.concatenate([np.zeros(1, np.int64), found + 1])
    spans = np.stack([starts, np.append(found, len(stream))], axis=1)
    return spans[spans[:, 1] > spans[:, 0]]
