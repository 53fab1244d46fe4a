"""What each source reads, and how it is split into training and held-out documents."""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from mlmoe.data import make_tokenizer, open_corpus, sources
from mlmoe.errors import UserError

TEXTS = [f"document {i} " * (1 + i % 7) for i in range(60)]
BYTES = make_tokenizer("bytes")


def _lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def _write_parquet(path, texts):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts}), path, row_group_size=7)


def _write_array_record(path, texts):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()


def _write_corpus(source, folder):
    """TEXTS in two files of the given kind (for 'files' in one file each)."""
    halves = {"a": TEXTS[:25], "b": TEXTS[25:]}
    for name, texts in halves.items():
        match source:
            case "files":
                (folder / name).mkdir()
                for i, text in enumerate(texts):
                    (folder / name / f"{i}.txt").write_text(text)
            case "jsonl":
                (folder / f"{name}.jsonl").write_bytes(_lines(texts))
            case "jsonl.gz":
                (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(_lines(texts)))
            case "jsonl.zst":  # two frames, as parallel compressors write them
                frames = _zstd(_lines(texts[:5])) + _zstd(_lines(texts[5:]))
                (folder / f"{name}.jsonl.zst").write_bytes(frames)
            case "parquet":
                _write_parquet(folder / f"{name}.parquet", texts)
            case "arrayrecord":
                _write_array_record(folder / f"{name}.array_record", texts)
            case "bin":
                ids = [i for t in texts for i in [*BYTES.encode(t).tolist(), BYTES.eos_id]]
                np.array(ids, np.uint16).tofile(folder / f"{name}.bin")
    return source.split(".")[0]


def _read(documents):
    return [d if isinstance(d, str) else BYTES.decode(d) for d in documents]


@pytest.mark.parametrize("whole", [True, False], ids=["in memory", "on demand"])
@pytest.mark.parametrize(
    "kind", ["files", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrayrecord", "bin"]
)
def test_every_document_is_on_exactly_one_side(make_config, tmp_path, monkeypatch, kind, whole):
    if not whole:
        monkeypatch.setattr(sources, "READ_WHOLE_BYTES", -1)
    source = _write_corpus(kind, tmp_path)
    corpus = open_corpus(make_config(source=source, path=str(tmp_path), heldout=0.3), BYTES)
    (part,) = corpus.parts
    train, heldout = _read(part.train), _read(part.heldout)
    assert sorted(train + heldout) == sorted(TEXTS)
    assert 8 <= len(heldout) <= 30  # 60 * 0.3 = 18 by a fair hash, standard deviation 3.5
    assert heldout != sorted(heldout, key=TEXTS.index)  # not in the order of the files
    assert corpus.parts[0].documents.n_bytes > 0 and not corpus.skipped


def test_rows_are_held_out_by_content_not_by_place(open_texts):
    forward = open_texts(TEXTS, heldout=0.3).parts[0]
    backward = open_texts(TEXTS[::-1] + TEXTS[:9], heldout=0.3).parts[0]
    assert set(forward.heldout) == set(backward.heldout)  # copies too are on one side


def test_copies_are_never_parted(open_texts):
    for heldout in (0.001, 0.3, 0.999):
        part = open_texts(["one"] * 5 + ["two"] * 20, heldout=heldout).parts[0]
        assert not set(part.train) & set(part.heldout)
        assert len(part.train) and len(part.heldout)
    with pytest.raises(UserError, match="all 5 documents are copies of one"):
        open_texts(["one"] * 5, heldout=0.3)


def test_a_file_that_cannot_be_read_is_a_bad_document(make_config, tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    read = Path.read_bytes

    def denied(path):
        if path.name == "b.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    config = make_config(source="files", path=str(tmp_path))
    with pytest.raises(UserError, match=r"b\.txt: Permission denied .*on_bad='skip'"):
        open_corpus(config, BYTES)
    corpus = open_corpus(dataclasses.replace(config, on_bad="skip"), BYTES)
    assert corpus.skipped == {"unreadable file": 1}


def test_files_are_held_out_by_name(make_config, tmp_path):
    def heldout(root):
        config = make_config(source="files", path=str(root), heldout=0.3)
        part = open_corpus(config, BYTES).parts[0]
        return {part.documents.name(int(i)) for i in part.heldout.indices}

    for root in ("x", "y"):
        (tmp_path / root).mkdir()
        for i in range(40):
            (tmp_path / root / f"{i}.txt").write_text(f"{root}{i}")
    assert heldout(tmp_path / "x") == heldout(tmp_path / "y") != set()


def test_a_small_corpus_has_a_document_on_either_side(open_texts):
    for heldout in (0.001, 0.999):
        part = open_texts(["one", "two"], heldout=heldout).parts[0]
        assert (len(part.train), len(part.heldout)) == (1, 1)
    with pytest.raises(UserError, match="one document cannot be split"):
        open_texts(["one"], heldout=0.5)


def test_stdlib_is_this_pythons_own_code_without_tests_and_packages(make_config):
    corpus = open_corpus(make_config(heldout=0.05), BYTES)
    part = corpus.parts[0]
    names = [part.documents.name(i) for i in range(len(part.documents))]
    assert names == sorted(names) and "asyncio/base_events.py" in names and len(names) > 400
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)
    assert part.documents.n_bytes > 8e6 and len(part.heldout) > 10


def test_globs_cross_folders_and_hidden_files_are_left_out(make_config, tmp_path):
    for name in ("a/x.txt", "a/b/y.txt", "a/z.md", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def read(path):
        config = make_config(source="files", path=str(path))
        return sorted(open_corpus(config, BYTES).parts[0].train)

    assert read(tmp_path) == ["a/b/y.txt", "a/x.txt", "a/z.md"]
    assert read(tmp_path / "**" / "*.txt") == ["a/b/y.txt", "a/x.txt"]
    assert read(tmp_path / "a" / "z.md") == ["a/z.md"]


def test_folders_are_read_through_links_and_hidden_links_are_not_looked_at(make_config, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "elsewhere" / "y.txt").write_text("y")
    (tmp_path / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "a")  # a ring
    (tmp_path / "a" / ".#x.txt").symlink_to("me@host.123:4")  # as Emacs locks a file
    config = make_config(source="files", path=str(tmp_path / "a"))
    assert sorted(open_corpus(config, BYTES).parts[0].train) == ["x", "y"]


def test_text_keeps_its_line_ends_and_loses_only_the_byte_order_mark(open_file):
    data = b"\xef\xbb\xbfa\r\nb\xe2\x80\xa8c\x0c\n"
    assert list(open_file("files", "x.txt", data).parts[0].train) == ["a\r\nb\u2028c\x0c\n"]


def test_jsonl_accepts_the_files_people_have(open_file):
    """BOM, CRLF, blank lines, U+2028 inside a string, NaN, no newline at the end."""
    data = (
        b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"n": NaN, "text": "b\xe2\x80\xa8c"}\n'
        b"\n" + b" " * 40 + b'\n{"text": ""}\n{"text": "d"}'
    )
    corpus = open_file("jsonl", "x.jsonl", data)
    part = corpus.parts[0]
    assert list(part.train) == ["a", "b\u2028c", "d"]
    assert [part.documents.name(i) for i in range(3)] == ["x.jsonl:1", "x.jsonl:4", "x.jsonl:8"]


def test_bin_without_an_end_of_document_is_cut_into_spans(open_file):
    ids = np.arange(40_000) % 256
    documents = list(open_file("bin", "x.bin", ids.astype(np.uint16).tobytes()).parts[0].train)
    assert [len(d) for d in documents] == [16384, 16384, 40_000 - 2 * 16384]
    assert np.array_equal(np.concatenate(documents), ids)


def test_bin_drops_control_ids_and_empty_documents(open_file):
    ids = np.array([256, 1, 2, 257, 257, 256, 3, 257, 4], np.uint32)
    corpus = open_file("bin", "x.bin", ids.tobytes(), bin_dtype="uint32")
    assert [d.tolist() for d in corpus.parts[0].train] == [[1, 2], [3], [4]]
    assert all(d.dtype == np.int32 for d in corpus.parts[0].train)
