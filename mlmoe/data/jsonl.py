"""JSON lines as documents: the source 'jsonl', plain (memory-mapped), .gz or .zst.

Lines end at a newline byte only: U+2028 or a form feed inside a string is text. Blank lines
are ignored and a byte-order mark is dropped; line numbers in messages count every line.
"""

import gzip
import json
import mmap
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlmoe.data.documents import BadDocument, BadDocuments, check_text, decode_text, row_keys
from mlmoe.data.files import find_files
from mlmoe.errors import UserError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json")
_CHUNK = 2**20
_DECOMPRESSED_LIMIT = 4 * 2**30  # compressed files live in memory; plain ones are mapped
_UNREADABLE = b"\n\n"  # two blank lines; this object, which no file that is read is
_BLANK_LENGTH = 16  # a longer run of white space is an empty document, not a blank line


class JsonLines:
    """One document a line: the string in `field` of a JSON object."""

    split_by_name = False

    def __init__(self, path: str, field: str, max_line_mb: int, bad: BadDocuments):
        root, names = find_files(path, _SUFFIXES)
        self._names, self._field = names, field
        self._buffers = [_read(root / name, bad) for name in names]
        self._lines: list[np.ndarray] = []  # a file: [lines, 3] start, end, line number
        for name, buffer in zip(names, self._buffers, strict=True):
            lines = _index(buffer)
            if not len(lines) and buffer is not _UNREADABLE:
                bad.report(BadDocument("file without rows", f"{name}: no line with content"))
            self._lines.append(_drop_long(lines, name, max_line_mb, bad))
        self._ends = np.cumsum([len(lines) for lines in self._lines]).tolist()
        self.files = tuple((n, len(b)) for n, b in zip(names, self._buffers, strict=True))
        self.n_bytes = sum(len(buffer) for buffer in self._buffers)

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[int, np.ndarray]:
        file = bisect_right(self._ends, index)
        return file, self._lines[file][index - self._ends[file]]  # negative: from the file's end

    def __getitem__(self, index: int) -> str:
        file, (start, end, _) = self._locate(index)
        where = self.name(index)
        text = decode_text(self._buffers[file][start:end], where)
        return parse_record(text, self._field, where) if text.strip() else ""

    def name(self, index: int) -> str:
        file, (_, _, line) = self._locate(index)
        return f"{self._names[file]}:{line}"

    def keys(self) -> np.ndarray:
        counts = [len(lines) for lines in self._lines]
        return row_keys(list(zip(self._names, counts, strict=True)))

    def sizes(self) -> np.ndarray:
        """Of the lines: a little more than of their text."""
        return np.concatenate([lines[:, 1] - lines[:, 0] for lines in self._lines])


def parse_record(line: str, field: str, where: str) -> str:
    """The text in `field` of one JSON object; BadDocument says what is wrong and where."""
    try:
        record = json.loads(line, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "duplicate key" if isinstance(error, _DuplicateKey) else "invalid JSON"
        raise BadDocument(reason, f"{where}: {reason}: {error}") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise BadDocument("not an object", f"{where}: a JSON object is needed, found a {kind}")
    if field not in record:
        keys = ", ".join(map(repr, record)) or "none"
        message = f"{where}: no field {field!r}; fields here: {keys} (set data.text_field)"
        raise BadDocument("no text field", message)
    text = record[field]
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        raise BadDocument("text not a string", f"{where}: field {field!r} is {kind}, not a string")
    return check_text(text, where)


class _DuplicateKey(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _DuplicateKey(f"{repeated!r} appears twice")
    return record


def _read(path: Path, bad: BadDocuments) -> bytes | mmap.mmap:
    """The file decompressed; none of it where it is damaged and `bad` leaves such out."""
    if path.stat().st_size == 0:
        return b""
    if path.suffix not in (".gz", ".zst"):
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pieces, total = [], 0
    try:
        for piece in _gunzip(path) if path.suffix == ".gz" else _unzstd(path):
            pieces.append(piece)
            total += len(piece)
            if total > _DECOMPRESSED_LIMIT:
                limit = _DECOMPRESSED_LIMIT // 2**30
                raise UserError(f"{path}: more than {limit} GiB decompressed; decompress it first")
    except (EOFError, OSError, zlib.error) as error:
        message = f"{path}: truncated or damaged: {error}"
        bad.report(BadDocument("damaged file", message))
        return _UNREADABLE
    return b"".join(pieces)


def _gunzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as file:
        while piece := file.read(_CHUNK):
            yield piece


def _unzstd(path: Path) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: .zst needs zstandard: pip install -e '.[data]'") from None
    with path.open("rb") as file:
        frame = None
        while piece := file.read(_CHUNK):
            while piece:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(piece)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame is not None:  # zstandard ends quietly in the middle of a frame
            raise EOFError("the last frame is not complete")


def _index(buffer: bytes | mmap.mmap) -> np.ndarray:
    """[lines, 3] int64 start, end (without newline) and 1-based number of each non-blank line."""
    data = np.frombuffer(buffer, np.uint8)
    step = 64 * _CHUNK
    newlines = [np.flatnonzero(data[i : i + step] == 10) + i for i in range(0, len(data), step)]
    ends = np.concatenate([*newlines, np.array([len(data)], np.int64)])
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    lines = np.stack([starts, ends, np.arange(1, len(ends) + 1)], axis=1)
    keep = np.ones(len(lines), bool)
    for i in np.flatnonzero(ends - starts <= _BLANK_LENGTH):
        keep[i] = bool(buffer[starts[i] : ends[i]].removeprefix(b"\xef\xbb\xbf").strip())
    return lines[keep]


def _drop_long(lines: np.ndarray, name: str, max_mb: int, bad: BadDocuments) -> np.ndarray:
    long = lines[:, 1] - lines[:, 0] > max_mb * 1e6
    for start, end, number in lines[long]:
        size = f"{(end - start) / 1e6:.1f} MB"
        message = f"{name}:{number}: a line of {size}, above data.max_line_mb={max_mb}"
        bad.report(BadDocument("line too long", message))
    return lines[~long]
