"""The fingerprint changes with everything that changes the batches, and with nothing else."""

import json

import pytest

from mlmoe.data import describe_difference, fingerprint, make_tokenizer, open_corpus, sources

BYTES = make_tokenizer("bytes")
SIZES = {"tokenizer": BYTES, "context": 16, "batch_size": 4, "seed": 0}
TEXTS = ["one", "two", "three"]


def test_the_same_run_has_the_same_fingerprint_and_it_is_json(open_texts):
    first = fingerprint(open_texts(TEXTS), **SIZES)
    again = fingerprint(open_texts(TEXTS), **SIZES)
    assert describe_difference(json.loads(json.dumps(first)), again) == []


@pytest.mark.parametrize("change", ["context", "batch_size", "seed", "process_count"])
def test_each_size_is_named(open_texts, change):
    corpus = open_texts(TEXTS)
    before = fingerprint(corpus, **SIZES, process_count=2)
    after = fingerprint(corpus, **{**SIZES, "process_count": 2, change: 6})
    old = {**SIZES, "process_count": 2}[change]
    assert describe_difference(before, after) == [f"data.{change}: {old} -> 6"]


@pytest.mark.parametrize(
    "changes",
    [{"packing": "best_fit"}, {"pack_bins": 5}, {"heldout": 0.5}],
)
def test_each_option_that_moves_batches_is_named(open_texts, changes):
    before = fingerprint(open_texts(TEXTS), **SIZES)
    lines = describe_difference(before, fingerprint(open_texts(TEXTS, **changes), **SIZES))
    assert len(lines) == 1 and lines[0].startswith(f"data.{next(iter(changes))}: ")


@pytest.mark.parametrize("whole", [True, False], ids=["in memory", "on demand"])
def test_the_corpus_is_part_of_it(open_texts, monkeypatch, whole):
    if not whole:
        monkeypatch.setattr(sources, "READ_WHOLE_BYTES", -1)
    before = fingerprint(open_texts(TEXTS), **SIZES)
    lines = describe_difference(before, fingerprint(open_texts([*TEXTS, "four"]), **SIZES))
    assert len(lines) == 1 and "3 documents" in lines[0] and "4 documents" in lines[0]


def test_one_changed_letter_is_seen(open_texts):
    before = fingerprint(open_texts(TEXTS), **SIZES)
    after = fingerprint(open_texts(["one", "twp", "three"]), **SIZES)
    assert [line.split(":")[0] for line in describe_difference(before, after)] == ["data.corpus.0"]


def test_the_tokenizer_is_part_of_it(open_texts, bpe_path):
    corpus = open_texts(TEXTS)
    other = fingerprint(corpus, **{**SIZES, "tokenizer": make_tokenizer(str(bpe_path))})
    lines = describe_difference(fingerprint(corpus, **SIZES), other)
    assert len(lines) == 1 and lines[0].startswith("data.tokenizer: bytes")


def test_where_the_files_lie_and_how_they_are_read_is_not(open_texts, make_config, tmp_path):
    before = fingerprint(open_texts(TEXTS), **SIZES)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "texts.jsonl").write_bytes((tmp_path / "texts.jsonl").read_bytes())
    config = make_config(source="jsonl", path=str(moved), prefetch=3, on_bad="skip")
    assert describe_difference(before, fingerprint(open_corpus(config, BYTES), **SIZES)) == []


def test_a_missing_or_new_entry_is_a_difference():
    assert describe_difference({"a": 1}, {"b": 2}) == ["a: 1 -> absent", "b: absent -> 2"]
