"""Opening a corpus: each source of the config, split into training and held-out documents.

A document is held out when its hash u (uniform in [0, 1)) is below `data.heldout`: of the
file's relative name for text files; of the content for rows, so that copies fall on one side
(of file name and row number where the corpus is too large to read at start). Never by order:
the last files of a folder are one letter range. At least one document is on either side.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mlmoe.data.config import FILE_SOURCES, DataConfig
from mlmoe.data.documents import (
    READ_WHOLE_BYTES,
    BadDocuments,
    Documents,
    Loaded,
    Subset,
)
from mlmoe.data.files import TextFiles
from mlmoe.data.joined import Joined
from mlmoe.data.jsonl import JsonLines
from mlmoe.data.records import ArrayRecord, Parquet
from mlmoe.data.task_documents import TaskDocuments
from mlmoe.data.token_file import TokenFiles
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError


@dataclass(frozen=True)
class Part:
    """One source of the corpus; its held-out documents are in the order of their keys."""

    name: str
    weight: float  # share of the training tokens, before normalising
    documents: Documents
    train: Subset
    heldout: Subset


@dataclass(frozen=True)
class Corpus:
    """All sources of a config, opened, checked as far as is cheap, and split."""

    config: DataConfig
    parts: tuple[Part, ...]
    bad: BadDocuments

    @property
    def skipped(self) -> Counter[str]:
        """Documents left out so far, by reason (in a large corpus, every time one is reached)."""
        return self.bad.counts

    def describe(self) -> str:
        """One line a source, for the log of a run."""
        lines = [
            f"{p.name}: {len(p.train):,} training and {len(p.heldout):,} held-out documents, "
            f"{p.documents.n_bytes / 1e6:,.1f} MB"
            for p in self.parts
        ]
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            lines.append(f"documents left out: {reasons}")
        return "\n".join(lines)


def open_corpus(config: DataConfig, tokenizer: Tokenizer, *, context: int = 256) -> Corpus:
    """Opens, checks and splits every source of `config`. Raises UserError for bad input.

    `context` is the length of the longest example of source 'tasks', unless its path says another,
    and what a document of joined files has at least.
    """
    bad = BadDocuments(config.on_bad)
    parts = []
    for source, path, weight in config.parts():
        name = f"{source}:{path}" if path else source
        try:
            documents = _open(source, path, config, tokenizer, context, bad)
            # Tasks are made when they are read: 65,536 at once would take seconds.
            if documents.n_bytes <= READ_WHOLE_BYTES and source != "tasks":
                documents = Loaded(documents, bad)
        except OSError as e:
            raise UserError(f"{name}: {e.filename or path}: {e.strerror or e}") from None
        if not len(documents):
            reasons = ", ".join(f"{n} {r}" for r, n in bad.counts.items()) or "nothing in it"
            raise UserError(f"{name}: no usable document ({reasons})")
        sides = (Subset(documents, side, bad) for side in _split(documents, config.heldout, name))
        if config.join_files and source in FILE_SOURCES:
            sides = (_join(side, round(context * tokenizer.bytes_per_token)) for side in sides)
        parts.append(Part(name, weight, documents, *sides))
    return Corpus(config, tuple(parts), bad)


def _join(files: Subset, size: int) -> Subset:
    joined = Joined(files, size)
    return Subset(joined, np.arange(len(joined)), files.bad)


def _open(
    source: str,
    path: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    context: int,
    bad: BadDocuments,
) -> Documents:
    match source:
        case "stdlib":
            return TextFiles.of_stdlib()
        case "files":
            return TextFiles.of_path(path)
        case "jsonl":
            return JsonLines(path, config.text_field, config.max_line_mb, bad)
        case "parquet":
            return Parquet(path, config.text_field, bad)
        case "arrayrecord":
            return ArrayRecord(path, bad)
        case "tasks":
            return TaskDocuments(path, context, tokenizer)
        case _:
            return TokenFiles(path, config.bin_dtype, tokenizer, bad)


def _between_copies(keys: np.ndarray, count: int) -> int:
    """The nearest cut of ascending `keys` at or above `count` that parts no equal ones, or below;
    0 where all are equal."""
    cuts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    above = cuts[cuts >= count]
    return int(above[0] if len(above) else cuts[-1] if len(cuts) else 0)


def _split(documents: Documents, heldout: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training documents (ascending) and of held-out ones (by key)."""
    keys = documents.keys()
    order = np.argsort(keys, kind="stable")
    count = int(np.sum(keys < np.uint64(heldout * 2.0**64)))
    if heldout:
        if len(keys) < 2:
            message = f"{name}: one document cannot be split into training and held-out ones"
            raise UserError(f"{message}; add documents, or train on it with data.heldout=0")
        count = _between_copies(keys[order], min(max(count, 1), len(keys) - 1))
        if not count:
            raise UserError(f"{name}: all {len(keys):,} documents are copies of one; add others")
    return np.sort(order[count:]), order[:count]
