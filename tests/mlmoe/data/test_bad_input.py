"""Each kind of bad input: an error that names the file and row, or a count where skipped."""

import gzip
import json
import os
import sys

import numpy as np
import pytest

from mlmoe.data import make_tokenizer, open_corpus, sources, train_batches
from mlmoe.errors import UserError

GOOD = b'{"text": "good"}\n'
BAD_LINES = {  # line 2 of a jsonl file: (line, what the message says, reason counted)
    "invalid UTF-8": (b'{"text": "caf\xe9"}', "byte 0xe9", "invalid UTF-8"),
    "cut off": (b'{"text": "ab', "invalid JSON", "invalid JSON"),
    "null": (b'{"text": null}', "field 'text' is null", "text not a string"),
    "number": (b'{"text": 3}', "field 'text' is int", "text not a string"),
    "missing": (b'{"body": "x", "id": 1}', "fields here: 'body', 'id'", "no text field"),
    "list": (b'["text"]', "found a list", "not an object"),
    "twice": (b'{"text": "a", "text": "b"}', "'text' appears twice", "duplicate key"),
    "NUL": (b'{"text": "a\\u0000b"}', "NUL byte at character 1", "NUL byte"),
    "surrogate": (b'{"text": "a\\ud800"}', "lone surrogate", "lone surrogate"),
    "too long": (b'{"text": "' + b"x" * 2**20 + b'"}', "data.max_line_mb=1", "line too long"),
    "too deep": (b'{"text": ' + b"[" * 200_000, "invalid JSON", "invalid JSON"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_or_counted(open_file, case):
    line, says, reason = BAD_LINES[case]
    data = GOOD + line + b"\n" + GOOD
    with pytest.raises(UserError) as raised:
        open_file("jsonl", "x.jsonl", data)
    assert "x.jsonl:2" in str(raised.value) and says in str(raised.value)
    corpus = open_file("jsonl", "x.jsonl", data, on_bad="skip")
    assert list(corpus.parts[0].train) == ["good", "good"]
    assert corpus.skipped == {reason: 1} and f"1 {reason}" in corpus.describe()


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"a\ncaf\xe9", "b:b.txt:2: invalid UTF-8"), (b"a\n\nb\0", "b:b.txt:3: a NUL byte")],
)
def test_a_bad_text_file_is_named_or_counted(make_config, tmp_path, data, says):
    (tmp_path / "a.txt").write_bytes(b"fine")
    (tmp_path / "b:b.txt").write_bytes(data)
    with pytest.raises(UserError, match=says):
        open_corpus(make_config(source="files", path=str(tmp_path)), make_tokenizer("bytes"))
    config = make_config(source="files", path=str(tmp_path), on_bad="skip")
    corpus = open_corpus(config, make_tokenizer("bytes"))
    assert list(corpus.parts[0].train) == ["fine"] and corpus.skipped.total() == 1


@pytest.mark.parametrize(
    ("source", "name", "content", "says"),
    [
        ("jsonl", "x.jsonl", b"", "x.jsonl: no line with content"),
        ("jsonl", "x.jsonl", b"\n \r\n", "x.jsonl: no line with content"),
        ("jsonl", "x.jsonl.gz", gzip.compress(GOOD * 900, mtime=0)[:-9], "truncated or damaged"),
        ("jsonl", "x.jsonl.gz", b"not gzip", "truncated or damaged"),
        ("files", "x.txt", b"", "no usable document (1 empty)"),
        ("parquet", "x.parquet", b"PAR1 cut off", "truncated or not a parquet file"),
        ("arrayrecord", "x.array_record", b"", "was its writer closed?"),
        ("arrayrecord", "x.array_record", b"\0" * 70_000, "was its writer closed?"),
        ("bin", "x.bin", b"", "x.bin: the file is empty"),
        ("bin", "x.bin", b"abc", "3 bytes is no whole number of uint16 ids"),
        ("bin", "x.bin", np.array([5, 258], np.uint16).tobytes(), "id 258 at token 1"),
    ],
)
def test_a_bad_file_is_named_when_the_corpus_is_opened(open_file, source, name, content, says):
    with pytest.raises(UserError) as raised:
        open_file(source, name, content)
    assert says in str(raised.value) and name in str(raised.value)


def test_truncated_zst(open_file):
    data = pytest.importorskip("zstandard").ZstdCompressor().compress(GOOD * 900)
    for cut in (1, len(data) // 2):
        with pytest.raises(UserError, match=r"x\.jsonl\.zst: truncated or damaged"):
            open_file("jsonl", "x.jsonl.zst", data[:-cut])
    with pytest.raises(UserError, match="truncated or damaged"):
        open_file("jsonl", "x.jsonl.zst", b"not zstd at all")


@pytest.mark.parametrize(
    ("name", "source"), [("b.jsonl.gz", "jsonl"), ("b.parquet", "parquet"), ("b.array_record", "")]
)
def test_a_damaged_file_is_counted_where_there_are_others(make_config, tmp_path, name, source):
    (tmp_path / name).write_bytes(gzip.compress(GOOD * 900)[:-9])
    source = source or "arrayrecord"
    config = make_config(source=source, path=str(tmp_path), on_bad="skip")
    with pytest.raises(UserError, match=r"no usable document \(1 damaged file"):
        open_corpus(config, make_tokenizer("bytes"))
    if source == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(GOOD)
        corpus = open_corpus(config, make_tokenizer("bytes"))
        assert corpus.skipped == {"damaged file": 1} and len(corpus.parts[0].train) == 1


def test_a_file_without_rows_is_counted_where_there_are_others(make_config, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(b"")
    config = make_config(source="jsonl", path=str(tmp_path), on_bad="skip")
    corpus = open_corpus(config, make_tokenizer("bytes"))
    assert corpus.skipped == {"file without rows": 1} and len(corpus.parts[0].train) == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"body": ["x"]}, "no column 'text'; columns: 'body'"),
        ({"text": [1, 2]}, "holds int64, not strings"),
        ({"text": [["a"]]}, "not strings"),
        ({"text": ["a", None]}, "x.parquet:1: column 'text' is null"),
        ({"text": ["a", "b\0"]}, "x.parquet:1"),
        ({"text": []}, "not strings|no rows"),
    ],
)
def test_bad_parquet(make_config, tmp_path, columns, says):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    config = make_config(source="parquet", path=str(tmp_path / "x.parquet"))
    with pytest.raises(UserError, match=says):
        open_corpus(config, make_tokenizer("bytes"))


def test_a_parquet_column_that_is_there_twice(make_config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "x.parquet")
    config = make_config(source="parquet", path=str(tmp_path / "x.parquet"))
    with pytest.raises(UserError, match=r"x\.parquet: 2 columns 'text'"):
        open_corpus(config, make_tokenizer("bytes"))


def test_a_file_name_that_is_not_utf8(make_config, tmp_path):
    (tmp_path / "good.txt").write_text("good")
    try:
        with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
            file.write("text")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(UserError, match=r"the file name 'caf\\udce9.txt' is not UTF-8"):
        open_corpus(make_config(source="files", path=str(tmp_path)), make_tokenizer("bytes"))


def test_empty_parquet_and_array_record_files(make_config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    module = pytest.importorskip("array_record.python.array_record_module")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    module.ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1").close()
    for source, says in (("parquet", "has no rows"), ("arrayrecord", "has no records")):
        with pytest.raises(UserError, match=says):
            config = make_config(source=source, path=str(tmp_path))
            open_corpus(config, make_tokenizer("bytes"))


@pytest.mark.parametrize("glob", ["", "/*.txt"])
def test_a_link_to_nothing_is_named(make_config, tmp_path, glob):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(UserError, match=r"gone.txt is a link to .*elsewhere.txt, which does not"):
        open_corpus(make_config(source="files", path=f"{tmp_path}{glob}"), make_tokenizer("bytes"))


def test_missing_paths_and_packages(make_config, tmp_path, monkeypatch):
    def opening(source, path):
        with pytest.raises(UserError) as raised:
            open_corpus(make_config(source=source, path=str(path)), make_tokenizer("bytes"))
        return str(raised.value)

    assert "does not exist" in opening("files", tmp_path / "none")
    assert "holds no file that ends in .parquet" in opening("parquet", tmp_path)
    assert "holds no file" in opening("jsonl", tmp_path / "*.jsonl")
    (tmp_path / "x.jsonl.zst").write_bytes(b"x")
    (tmp_path / "x.parquet").write_bytes(b"x")
    for package, source in (("zstandard", "jsonl"), ("pyarrow.parquet", "parquet")):
        monkeypatch.setitem(sys.modules, package, None)
        assert "pip install -e '.[data]'" in opening(source, tmp_path)


def test_uint16_cannot_hold_a_large_vocabulary(make_config, tmp_path, bpe_path):
    np.zeros(4, np.uint16).tofile(tmp_path / "x.bin")
    tokenizer = make_tokenizer(str(bpe_path))
    tokenizer.vocab_size = 65_537
    with pytest.raises(UserError, match="nearest valid: 'uint32'"):
        open_corpus(make_config(source="bin", path=str(tmp_path)), tokenizer)


def test_bad_rows_of_a_large_corpus_surface_in_training(open_file, monkeypatch):
    """Too large to read at start: the same message, from the batch that reaches the row."""
    monkeypatch.setattr(sources, "READ_WHOLE_BYTES", -1)
    data = GOOD * 3 + b'{"text": null}\n'
    sizes = {"context": 4, "batch_size": 2, "seed": 0, "tokenizer": make_tokenizer("bytes")}
    for prefetch in (0, 2):
        batches = train_batches(open_file("jsonl", "x.jsonl", data, prefetch=prefetch), **sizes)
        with pytest.raises(UserError, match=r"x\.jsonl:4: field 'text' is null"):
            [next(batches) for _ in range(9)]
    corpus = open_file("jsonl", "x.jsonl", data, on_bad="skip")
    batches = train_batches(corpus, **sizes)
    assert all(next(batches).weights_BT.sum() > 0 for _ in range(9))
    assert corpus.skipped["text not a string"] >= 1


def test_a_large_corpus_of_only_bad_rows_ends_with_an_error(open_file, monkeypatch):
    monkeypatch.setattr(sources, "READ_WHOLE_BYTES", -1)
    corpus = open_file("jsonl", "x.jsonl", b'{"text": null}\n' * 5, on_bad="skip")
    sizes = {"context": 4, "batch_size": 2, "seed": 0, "tokenizer": make_tokenizer("bytes")}
    with pytest.raises(UserError, match="no usable document among 5"):
        next(train_batches(corpus, **sizes))


def test_the_error_names_the_row_even_in_the_middle_of_many(open_file):
    rows = [json.dumps({"text": f"row {i}"}).encode() for i in range(500)]
    rows[321] = b"{broken"
    with pytest.raises(UserError, match=r"x\.jsonl:322: invalid JSON"):
        open_file("jsonl", "x.jsonl", b"\n".join(rows))
