"""Training batches: epochs, processes, mixtures, resuming."""

import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from mlmoe.data import make_tokenizer, open_corpus, train_batches
from mlmoe.data.pipeline import document_stream
from mlmoe.errors import UserError

BYTES = make_tokenizer("bytes")
TEXTS = [f"{i:03d}" + "abcdefg"[i % 7] * (i * i % 90) for i in range(37)]
SIZES = {"tokenizer": BYTES, "context": 16, "batch_size": 4}


def _take(batches, count):
    return list(itertools.islice(batches, count))


def _equal(left, right):
    pairs = zip(left, right, strict=True)
    return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_batches_have_the_agreed_shape(open_texts):
    batch = next(train_batches(open_texts(TEXTS), **SIZES, seed=0))
    assert all(field.shape == (4, 16) for field in batch)
    assert batch.weights_BT.sum() > 0


def test_every_epoch_is_its_own_permutation(open_texts):
    part = open_texts(TEXTS).parts[0]
    stream = document_stream(part.train, seed=0, key=(0,))
    epochs = [[stream[e * len(TEXTS) + i] for i in range(len(TEXTS))] for e in range(3)]
    assert all(sorted(epoch) == sorted(TEXTS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = document_stream(part.train, seed=1, key=(0,))
    assert [other[i] for i in range(len(TEXTS))] not in epochs  # grain's own seed + epoch would be


def test_batches_depend_on_the_seed_alone(open_texts):
    corpus = open_texts(TEXTS)
    first = _take(train_batches(corpus, **SIZES, seed=3), 20)
    random.seed(99)
    np.random.seed(99)
    assert _equal(first, _take(train_batches(corpus, **SIZES, seed=3), 20))
    assert not _equal(first, _take(train_batches(corpus, **SIZES, seed=4), 20))


def test_batches_are_the_same_in_another_process(open_texts, tmp_path):
    corpus = open_texts(TEXTS)
    code = f"""
import itertools, sys
from mlmoe.data import DataConfig, make_tokenizer, open_corpus, train_batches
tokenizer = make_tokenizer("bytes")
corpus = open_corpus({corpus.config!r}, tokenizer)
batches = train_batches(corpus, tokenizer=tokenizer, context=16, batch_size=4, seed=3)
print([b.tokens_BT.tolist() for b in itertools.islice(batches, 5)])
"""
    expected = [b.tokens_BT.tolist() for b in _take(train_batches(corpus, **SIZES, seed=3), 5)]
    environment = {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_resuming_continues_bit_for_bit(open_texts, packing, prefetch):
    """Stops in the first, second and fourth epoch (about 11 batches each); JSON in between."""
    corpus = open_texts(TEXTS, packing=packing, prefetch=prefetch)
    whole = _take(train_batches(corpus, **SIZES, seed=0), 60)
    for stop in (0, 1, 7, 22, 45):
        before = train_batches(corpus, **SIZES, seed=0)
        _take(before, stop)
        state = json.loads(json.dumps(before.get_state()))
        before.close()
        after = train_batches(corpus, **SIZES, seed=0)
        next(after)  # restoring also works where reading has begun
        after.set_state(state)
        assert _equal(_take(after, 60 - stop), whole[stop:])
        after.close()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_processes_share_no_document(open_texts, count):
    """Over the first epoch, with the number of documents no multiple of the processes."""
    part = open_texts(TEXTS).parts[0]
    stream = document_stream(part.train, seed=0, key=(0,))
    shares = [stream[process::count] for process in range(count)]
    per_epoch = [-(-(len(TEXTS) - process) // count) for process in range(count)]
    seen = [[share[i] for i in range(n)] for share, n in zip(shares, per_epoch, strict=True)]
    assert sorted(text for texts in seen for text in texts) == sorted(TEXTS)


def test_processes_have_their_share_of_rows_and_never_run_out(open_texts):
    corpus = open_texts(["first document", "second one", "the third"])
    sizes = {**SIZES, "batch_size": 8, "process_count": 4}
    runs = [_take(train_batches(corpus, **sizes, seed=0, process_index=p), 30) for p in range(4)]
    assert all(len(run) == 30 and run[0].tokens_BT.shape == (2, 16) for run in runs)
    assert not _equal(runs[0], runs[1])


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_mixture_weights_are_shares_of_the_tokens(make_config, tmp_path, packing):
    """3 to 1, although the documents of the rarer source are ten times as long."""
    for letter, size in (("a", 30), ("b", 300)):
        rows = [json.dumps({"text": letter * (size + i % 9)}) for i in range(40)]
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(rows))
    mixture = tuple(("jsonl", str(tmp_path / f"{x}.jsonl"), w) for x, w in (("a", 3.0), ("b", 1.0)))
    corpus = open_corpus(make_config(mixture=mixture, packing=packing), BYTES)
    batches = train_batches(corpus, **SIZES, seed=0)
    tokens = np.concatenate([b.tokens_BT[b.segment_ids_BT > 0] for b in _take(batches, 200)])
    share = np.mean(tokens == ord("a")) / np.mean((tokens == ord("a")) | (tokens == ord("b")))
    assert 0.70 < share < 0.80
    state = batches.get_state()
    rest = _take(batches, 10)
    again = train_batches(corpus, **SIZES, seed=0)
    again.set_state(state)
    assert _equal(_take(again, 10), rest)


def test_text_that_spells_a_control_token_stays_text(open_texts, bpe_path):
    tokenizer = make_tokenizer(str(bpe_path))
    text = "one <|endoftext|><|bos|> two"
    batches = train_batches(
        open_texts([text]), tokenizer=tokenizer, context=300, batch_size=1, seed=0
    )
    batch = next(batches)
    first = batch.tokens_BT[0][batch.segment_ids_BT[0] == 1]
    assert first[0] == tokenizer.bos_id and first[-1] == tokenizer.eos_id
    assert tokenizer.decode(first) == text
    assert not set(first[1:-1].tolist()) & {tokenizer.bos_id, tokenizer.eos_id}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": 5, "process_count": 2}, "nearest valid: 4"),
        ({"batch_size": 1, "process_count": 4}, "nearest valid: 4"),
        ({"context": 1}, "at least 2"),
        ({"seed": -1}, "must not be negative"),
    ],
)
def test_sizes_that_give_no_batches(open_texts, changes, says):
    with pytest.raises(UserError, match=says):
        train_batches(open_texts(TEXTS), **{**SIZES, "seed": 0, **changes})
