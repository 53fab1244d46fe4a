"""Columnar and record files as documents: the sources 'parquet' and 'arrayrecord'."""

import functools
import threading
from bisect import bisect_right
from pathlib import Path
from typing import Any

import grain
import numpy as np

from mlmoe.data.documents import BadDocument, BadDocuments, check_text, decode_text, row_keys
from mlmoe.data.files import find_files
from mlmoe.errors import UserError

# Row groups kept decoded: a shuffled read touches one group a document, so a corpus of many
# groups is read fastest as ArrayRecord; a corpus of up to this many groups is read once.
_CACHED_GROUPS = 16


class Parquet:
    """One document a row: the string column `field`."""

    split_by_name = False

    def __init__(self, path: str, field: str, bad: BadDocuments):
        try:
            import pyarrow.parquet
        except ImportError:
            raise UserError("parquet needs pyarrow: pip install -e '.[data]'") from None
        self._open = pyarrow.parquet.ParquetFile
        self._root, self._names = find_files(path, (".parquet",))
        self._field = field
        self._groups: list[tuple[int, int, int]] = []  # file, row group, its first row in the file
        self._ends: list[int] = []  # row groups' last rows + 1, over all files
        self._rows: list[int] = []  # rows a file
        self.n_bytes = 0
        for file, name in enumerate(self._names):
            self._add_file(file, name, bad)
        self.files = tuple((n, (self._root / n).stat().st_size) for n in self._names)
        self._lock = threading.Lock()  # lru_cache may run the reader twice; pyarrow may not
        self._column = functools.lru_cache(_CACHED_GROUPS)(self._read_group)

    def _add_file(self, file: int, name: str, bad: BadDocuments) -> None:
        try:
            with self._open(self._root / name) as parquet:
                metadata, schema = parquet.metadata, parquet.schema_arrow
        except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
            message = f"{name}: truncated or not a parquet file: {error}"
            bad.report(BadDocument("damaged file", message))
            self._rows.append(0)
            return
        if self._field not in schema.names:
            columns = ", ".join(map(repr, schema.names))
            message = f"{name}: no column {self._field!r}; columns: {columns}"
            raise UserError(f"{message} (set data.text_field)")
        if schema.names.count(self._field) > 1:
            raise UserError(f"{name}: {schema.names.count(self._field)} columns {self._field!r}")
        kind = str(schema.field(self._field).type)
        if kind not in ("string", "large_string", "string_view") and not kind.startswith("dict"):
            raise UserError(f"{name}: column {self._field!r} holds {kind}, not strings")
        if metadata.num_rows == 0:
            bad.report(BadDocument("file without rows", f"{name}: the file has no rows"))
        first = 0
        for group in range(metadata.num_row_groups):
            self._groups.append((file, group, first))
            info = metadata.row_group(group)
            first += info.num_rows
            self._ends.append((self._ends[-1] if self._ends else 0) + info.num_rows)
            self.n_bytes += info.total_byte_size
        self._rows.append(first)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read_group(self, position: int) -> Any:
        file, group, _ = self._groups[position]
        try:
            with self._open(self._root / self._names[file]) as parquet:
                return parquet.read_row_group(group, columns=[self._field]).column(0)
        except (OSError, ValueError) as error:
            message = f"{self._names[file]}: row group {group} is damaged: {error}"
            raise BadDocument("damaged row group", message) from None

    def _locate(self, index: int) -> tuple[int, int]:
        position = bisect_right(self._ends, index)
        return position, index - (self._ends[position - 1] if position else 0)

    def __getitem__(self, index: int) -> str:
        position, row = self._locate(index)
        where = self.name(index)
        with self._lock:
            value = self._column(position)[row]
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            raise BadDocument("invalid UTF-8", f"{where}: invalid UTF-8: {error}") from None
        if text is None:
            message = f"{where}: column {self._field!r} is null"
            raise BadDocument("text not a string", message)
        return check_text(text, where)

    def name(self, index: int) -> str:
        position, row = self._locate(index)
        file, _, first = self._groups[position]
        return f"{self._names[file]}:{first + row}"  # rows count from 0, as pyarrow's do

    def keys(self) -> np.ndarray:
        return row_keys(list(zip(self._names, self._rows, strict=True)))

    def sizes(self) -> None:
        """Not known without reading them."""


class ArrayRecord:
    """One document a record: UTF-8 text, files written with group_size:1."""

    split_by_name = False

    def __init__(self, path: str, bad: BadDocuments):
        root, self._names = find_files(path, (".array_record", ".arrayrecord"))
        self.files = tuple((name, (root / name).stat().st_size) for name in self._names)
        self._rows = [_count_records(root / name, bad) for name in self._names]
        self._ends = np.cumsum(self._rows).tolist()
        kept = [str(root / n) for n, rows in zip(self._names, self._rows, strict=True) if rows]
        self._source = grain.sources.ArrayRecordDataSource(kept) if kept else []
        self.n_bytes = sum(size for _, size in self.files)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        where = self.name(index)
        try:
            data = self._source[index]
        except RuntimeError as error:
            message = f"{where}: damaged record: {error or 'no details'}"
            raise BadDocument("damaged record", message) from None
        return check_text(decode_text(data, where), where)

    def name(self, index: int) -> str:
        file = bisect_right(self._ends, index)
        return f"{self._names[file]}:{index - self._ends[file] + self._rows[file]}"

    def keys(self) -> np.ndarray:
        return row_keys(list(zip(self._names, self._rows, strict=True)))

    def sizes(self) -> None:
        """Not known without reading them."""


def _count_records(path: Path, bad: BadDocuments) -> int:
    size = path.stat().st_size
    try:
        rows = len(grain.sources.ArrayRecordDataSource([str(path)]))
    except Exception as error:  # the reader's errors have no common type, and often no text
        details = str(error) or "the reader gives no reason"
        message = f"{path}: not a complete ArrayRecord file ({size:,} bytes): {details}"
        bad.report(BadDocument("damaged file", f"{message}; was its writer closed?"))
        return 0
    if rows == 0:
        bad.report(BadDocument("file without rows", f"{path}: the file has no records"))
    return rows
