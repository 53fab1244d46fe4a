"""Where the text comes from and how it is cut into rows: the `data` section of a config."""

import os
from dataclasses import dataclass

from mlmoe.errors import UserError, one_of

SOURCES = ("stdlib", "files", "jsonl", "parquet", "arrayrecord", "bin", "tasks")
FILE_SOURCES = ("stdlib", "files")
PACKINGS = ("split", "best_fit")
ON_BAD = ("raise", "skip")
BIN_DTYPES = ("uint16", "uint32")
_ENTRY = ((str, str, float), (str, str, int))  # of a mixture


@dataclass(frozen=True)
class DataConfig:
    """Every choice about data; the defaults and what they mean to a user are in configs/base.py."""

    source: str
    path: str  # a file, a folder or a glob; '' for stdlib; names of tasks for tasks
    mixture: tuple[tuple[str, str, float], ...]  # (source, path, share of tokens)
    text_field: str
    tokenizer: str  # 'bytes' or the path of a tokenizer.json
    packing: str
    pack_bins: int  # rows open at once, each fed by its own run of documents
    join_files: bool  # files of a folder as one document of a row's length
    long_rows: float  # share of the rows that are made of documents as long as a row
    heldout: float  # fraction of documents
    on_bad: str
    max_line_mb: int
    bin_dtype: str
    prefetch: int  # batches made ahead by one thread

    def __post_init__(self) -> None:
        one_of("data.packing", self.packing, PACKINGS)
        one_of("data.on_bad", self.on_bad, ON_BAD)
        one_of("data.bin_dtype", self.bin_dtype, BIN_DTYPES)
        _at_least("data.pack_bins", self.pack_bins, 1)
        _at_least("data.max_line_mb", self.max_line_mb, 1)
        _at_least("data.prefetch", self.prefetch, 0)
        if not 0.0 <= self.heldout < 1.0:
            raise UserError(f"data.heldout={self.heldout} must lie in [0, 1), for example 0.05")
        if not 0.0 <= self.long_rows <= 1.0:
            raise UserError(f"data.long_rows={self.long_rows} must lie in [0, 1]")
        if self.mixture and (self.path or self.source != "stdlib"):
            raise UserError(
                f"data.source={self.source!r} and data.path={self.path!r} would not be read: "
                "data.mixture is there in place of them; put them into it, or leave one out"
            )
        sources = {source for source, _, _ in self.parts()}
        if self.join_files and not sources & set(FILE_SOURCES):
            message = f"data.join_files is for the sources {', '.join(FILE_SOURCES)}; this run has"
            raise UserError(f"{message} {', '.join(sorted(sources))}")
        if not self.text_field:
            raise UserError("data.text_field is empty; name the field that holds the text")
        for source, path, weight in self.parts():
            _known_source(source)
            if source == "tasks" and not path:
                message = "data.path is empty; source 'tasks' needs names of tasks"
                raise UserError(f"{message}, such as 'passkey,needle_multi'")
            if source != "stdlib" and not path:
                raise UserError(f"data.path is empty; source {source!r} needs a file, folder, glob")
            if source == "stdlib" and path:
                raise UserError(f"data.path={path!r} must be '' for source 'stdlib'")
            if not 0.0 < weight < float("inf"):
                message = f"data.mixture weight {weight} of {source!r} must be above 0"
                raise UserError(f"{message} and finite")

    def parts(self) -> tuple[tuple[str, str, float], ...]:
        """The (source, path, weight) triples to read: the mixture, or the single source."""
        for entry in self.mixture:
            if not isinstance(entry, tuple) or tuple(map(type, entry)) not in _ENTRY:
                raise UserError(
                    f"data.mixture entry {entry!r} must be (source, path, weight), such as "
                    "('jsonl', 'texts.jsonl', 0.5)"
                )
        return self.mixture or ((self.source, self.path, 1.0),)


def _known_source(source: str) -> None:
    if source not in SOURCES and (os.sep in source or os.path.exists(source)):
        kinds = ("jsonl", "parquet", "arrayrecord", "bin")
        kind = next((k for k in kinds if f".{k}" in source.replace("_", "")), "files")
        message = f"data.source={source!r} is a path; did you mean"
        raise UserError(f"{message} --config.data.source={kind} --config.data.path={source}?")
    one_of("data.source", source, SOURCES)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value} must be at least {least}")
