"""Rows of long documents: related files joined, their share of the rows, and what is cut."""

import numpy as np
import pytest

from mlmoe.data import make_tokenizer, open_corpus, train_batches
from mlmoe.data.batch import split_targets
from mlmoe.errors import UserError

BYTES = make_tokenizer("bytes")
FILES = {
    "b/two.py": "b" * 30,
    "b/deep/three.py": "c" * 30,
    "b/one.py": "a" * 30,
    "top.py": "t" * 30,
    "a/x.py": "x" * 200,
    "a/y.py": "y" * 5,
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _open(make_config, folder, context, **changes):
    config = make_config(source="files", path=str(folder), join_files=True, **changes)
    return open_corpus(config, BYTES, context=context)


def test_files_follow_each_other_by_folder_until_a_document_is_long_enough(make_config, folder):
    corpus = _open(make_config, folder, context=60)
    documents = sorted(corpus.parts[0].train)
    a, y, x = "a" * 30, "y" * 5, "x" * 200
    assert documents == sorted(
        [
            f"top.py\n{'t' * 30}",
            f"a/x.py\n{x}",
            f"a/y.py\n{y}",
            f"b/one.py\n{a}\nb/two.py\n{'b' * 30}",
            f"b/deep/three.py\n{'c' * 30}",
        ]
    )
    sizes = corpus.parts[0].train.sizes()
    assert sizes is not None
    for text, size in zip(corpus.parts[0].train, sizes, strict=True):
        assert len(text) <= size <= len(text) + 1


def test_no_file_is_on_both_sides_and_none_is_lost(make_config, folder):
    part = _open(make_config, folder, context=10**6, heldout=0.4).parts[0]
    sides = ["\n".join(map(str, side)) for side in (part.train, part.heldout)]
    for name, text in FILES.items():
        assert sum(f"{name}\n{text}" in side for side in sides) == 1
    assert all(sides)


def test_a_bad_file_costs_only_itself(make_config, folder):
    (folder / "b/bad.py").write_bytes(b"caf\xe9")
    corpus = _open(make_config, folder, context=10**6, on_bad="skip")
    assert any("one.py" in text and "two.py" in text for text in corpus.parts[0].train)
    assert corpus.skipped == {"invalid UTF-8": 1}


def test_join_files_is_for_files(make_config):
    with pytest.raises(UserError, match="for the sources stdlib, files; this run has jsonl"):
        make_config(source="jsonl", path="x.jsonl", join_files=True)


def _rows(corpus, context, count):
    batches = train_batches(corpus, tokenizer=BYTES, context=context, batch_size=1, seed=3)
    rows = [next(batches) for _ in range(count)]
    batches.close()
    return rows


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_rows_is_made_of_long_documents(open_texts, share):
    texts = ["s" * 7] * 40 + ["L" * 62] * 4
    corpus = open_texts(texts, long_rows=share, packing="best_fit")
    rows = _rows(corpus, 64, 40)
    long = [bool((r.tokens_BT == ord("L")).any()) for r in rows]
    assert np.mean(long) == share
    for row, is_long in zip(rows, long, strict=True):
        assert (row.tokens_BT == ord("s")).any() != is_long
        assert not is_long or (row.segment_ids_BT.max() == 1)


def test_rows_of_buckets_resume_bit_for_bit(open_texts):
    corpus = open_texts(["s" * 7] * 40 + ["L" * 62] * 4, long_rows=0.5, packing="best_fit")
    arguments = {"tokenizer": BYTES, "context": 64, "batch_size": 1, "seed": 0}
    first, again = train_batches(corpus, **arguments), train_batches(corpus, **arguments)
    [next(first) for _ in range(7)]
    again.set_state(first.get_state())
    for _ in range(9):
        for a, b in zip(next(first), next(again), strict=True):
            np.testing.assert_array_equal(a, b)


def test_lengths_that_do_not_fit_the_share_are_errors(open_texts):
    corpus = open_texts(["s" * 7, "t" * 8], long_rows=0.5)
    with pytest.raises(UserError, match=r"longest of jsonl:.* 2 documents has 8 tokens, a row 64"):
        _rows(corpus, 64, 1)
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match=r"data\.long_rows=.* must lie in"):
            open_texts(["a"], long_rows=bad)


def test_all_long_needs_no_second_bucket(open_texts):
    rows = _rows(open_texts(["L" * 70] * 3, long_rows=0.5), 64, 6)
    assert all((r.tokens_BT == ord("L")).any() for r in rows)


def test_targets_of_documents_that_are_split_over_rows(open_texts):
    split = lambda r: split_targets(r, BYTES.bos_id, BYTES.eos_id)  # noqa: E731
    corpus = open_texts(["a" * 126], pack_bins=1)  # with bos and eos 127 targets, in rows of 64
    rows = _rows(corpus, 64, 2)
    assert [split(r) for r in rows] == [64, 63]
    (whole,) = _rows(open_texts(["a" * 5]), 64, 1)  # 6 targets each, the last one cut
    assert split(whole) == int(whole.weights_BT.sum()) % 6 < whole.weights_BT.sum()
    assert split(rows[0]._replace(weights_BT=0 * rows[0].weights_BT)) == 0
