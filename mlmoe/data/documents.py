"""What every source of documents offers, and what makes a document bad.

A source is a random-access sequence (grain's protocol): `len(docs)` and `docs[i]`, which
is text, or an int32 array where the corpus is stored as token ids. `docs[i]` raises
`BadDocument` for a document that cannot be used; everything else it raises is fatal.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlmoe.errors import UserError

Document = str | np.ndarray

# Corpora up to this size are read, checked and hashed whole when they are opened (1-2 s);
# larger ones document by document as training reaches them.
READ_WHOLE_BYTES = 256 * 2**20


class Texts(Protocol):
    """A random-access sequence of documents, for reading."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Document: ...

    def name(self, index: int) -> str: ...  # 'file' or 'file:row', for messages

    def sizes(self) -> np.ndarray | None: ...  # [len] bytes of text, or ids; None: not known


class Documents(Texts, Protocol):
    """All documents of a source."""

    n_bytes: int  # of text as stored, decompressed where that is known
    split_by_name: bool  # held out by name (files) or by content (rows)
    files: tuple[tuple[str, int], ...]  # (relative name, size)

    def keys(self) -> np.ndarray: ...  # [len] uint64, uniform, that decide what is held out


class BadDocument(UserError):
    """One document that cannot be used: `reason` is counted when bad documents are skipped."""

    def __init__(self, reason: str, message: str):
        super().__init__(f"{message} (data.on_bad='skip' leaves such documents out)")
        self.reason = reason


class BadDocuments:
    """What to do with bad documents: raise at the first, or count them by reason."""

    def __init__(self, on_bad: str):
        self.skip = on_bad == "skip"
        self.counts: Counter[str] = Counter()

    def report(self, error: BadDocument) -> None:
        if not self.skip:
            raise error
        self.counts[error.reason] += 1


@dataclass(frozen=True)
class Subset:
    """Some of the documents, in the order of `indices`; a skipped bad one reads as ''."""

    documents: Texts
    indices: np.ndarray
    bad: BadDocuments

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Document:
        try:
            return self.documents[int(self.indices[index])]
        except BadDocument as error:
            self.bad.report(error)
            return ""

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def name(self, index: int) -> str:
        return self.documents.name(int(self.indices[index]))

    def sizes(self) -> np.ndarray | None:
        sizes = self.documents.sizes()
        return None if sizes is None else sizes[self.indices]

    def where(self, mask: np.ndarray) -> "Subset":
        """Those of them for which `mask` is true."""
        return Subset(self.documents, self.indices[mask], self.bad)


def decode_text(data: bytes, where: str) -> str:
    """UTF-8 bytes to text without a leading byte-order mark; line ends are kept.

    Raises BadDocument for invalid UTF-8, naming `where` and the line.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = _at(where, data.count(b"\n", 0, error.start))
        message = f"{at}: invalid UTF-8, byte 0x{data[error.start]:02x} at offset {error.start}"
        raise BadDocument("invalid UTF-8", message) from None


def check_text(text: str, where: str) -> str:
    """The text itself; raises BadDocument for a NUL or a lone surrogate, which are no text."""
    if "\0" in text:
        at = _at(where, text.count("\n", 0, text.index("\0")))
        raise BadDocument("NUL byte", f"{at}: a NUL byte at character {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where}: lone surrogate {text[error.start]!r} at character {error.start}"
        raise BadDocument("lone surrogate", message) from None
    return text


def _at(where: str, newlines_before: int) -> str:
    """'file:line' for a whole file; a row ('file:row') has its number already."""
    return where if re.search(r":\d+$", where) else f"{where}:{newlines_before + 1}"


def stable_hash(data: bytes) -> int:
    """A 64-bit hash that is the same in every process (Python's own hash() is not)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def row_keys(files: Sequence[tuple[str, int]]) -> np.ndarray:
    """Uniform uint64 keys of rows known only by (file name, number of rows): splitmix64."""
    keys = []
    for name, rows in files:
        z = np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(stable_hash(name.encode()))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys.append(z ^ (z >> np.uint64(31)))
    return np.concatenate(keys) if keys else np.zeros(0, np.uint64)


def content_bytes(document: Document) -> bytes:
    """What hashing a document hashes."""
    return document.encode() if isinstance(document, str) else document.tobytes()


class Loaded:
    """Documents held in memory: a small corpus, read and checked whole."""

    def __init__(self, source: Documents, bad: BadDocuments):
        self.split_by_name, self.files = source.split_by_name, source.files
        self._names: list[str] = []
        self._documents: list[Document] = []
        kept = []
        for index in range(len(source)):
            try:
                document = source[index]
            except BadDocument as error:
                bad.report(error)
                continue
            if len(document) == 0:
                bad.counts["empty"] += 1
                continue
            kept.append(index)
            self._names.append(source.name(index))
            self._documents.append(document)
        self._keys = source.keys()[kept] if self.split_by_name else self._content_keys()
        sizes = [
            len(d) if isinstance(d, np.ndarray) or d.isascii() else len(d.encode())
            for d in self._documents
        ]
        self._sizes = np.array(sizes, np.int64)
        pairs = zip(sizes, self._documents, strict=True)
        self.n_bytes = sum(size if isinstance(d, str) else d.nbytes for size, d in pairs)

    def _content_keys(self) -> np.ndarray:
        keys = [stable_hash(content_bytes(d)) for d in self._documents]
        return np.array(keys, np.uint64)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def name(self, index: int) -> str:
        return self._names[index]

    def keys(self) -> np.ndarray:
        return self._keys

    def sizes(self) -> np.ndarray:
        return self._sizes
