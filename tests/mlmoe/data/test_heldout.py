"""Held-out accounting: every byte once, whatever the batch size; and the baselines."""

import json
import math

import numpy as np
import pytest

from mlmoe.data import baseline_bits, heldout_batches, heldout_texts, make_tokenizer
from mlmoe.data.baselines import _trigram_counts
from mlmoe.data.heldout import _pack, lossy
from mlmoe.errors import UserError

BYTES = make_tokenizer("bytes")
CONTEXT = 16
# One byte; around one row with and without bos and eos; ten rows; more than one byte a letter.
SIZES = [1, 2, 13, 14, 15, 16, 17, 31, 32, 160, 161]
TEXTS = ["é" * 9, *(chr(97 + i) * n for i, n in enumerate(SIZES * 3))]
ALL = {"tokenizer": BYTES, "max_bytes": 10**9}


def _loss(batch):
    """A stand-in for a model: depends on everything a model may look at."""
    tokens, targets, positions = batch.tokens_BT, batch.targets_BT, batch.positions_BT
    return np.sin(tokens * 1.7 + targets * 0.3 + positions * 0.11) + 2.0


@pytest.fixture
def corpus(open_texts):
    return open_texts(TEXTS, heldout=0.8)


def test_weights_count_every_byte_and_end_of_document_once(corpus):
    texts = heldout_texts(corpus, **ALL)
    batches, n_bytes = heldout_batches(corpus, **ALL, context=CONTEXT, batch_size=4)
    assert n_bytes == sum(len(text.encode()) for text in texts) and len(texts) > 15
    assert sum(b.weights_BT.sum() for b in batches) == n_bytes + len(texts)
    counted = np.concatenate([b.targets_BT[b.weights_BT > 0] for b in batches])
    expected = [i for text in texts for i in [*text.encode(), BYTES.eos_id]]
    assert sorted(counted.tolist()) == sorted(expected)


def test_every_document_starts_with_bos(corpus):
    texts = heldout_texts(corpus, **ALL)
    batches, _ = heldout_batches(corpus, **ALL, context=CONTEXT, batch_size=4)
    starts = sum(int(np.sum((b.tokens_BT == 256) & (b.weights_BT > 0))) for b in batches)
    assert starts == len(texts)


def test_the_result_does_not_depend_on_the_batch_size(corpus):
    totals = []
    for batch_size in (1, 3, 4, 64):
        batches, n_bytes = heldout_batches(corpus, **ALL, context=CONTEXT, batch_size=batch_size)
        assert all(b.tokens_BT.shape == (batch_size, CONTEXT) for b in batches)
        totals.append(sum((_loss(b) * b.weights_BT).sum() for b in batches) / n_bytes)
    assert np.ptp(totals) < 1e-6


def test_processes_divide_the_rows(corpus):
    sizes = {**ALL, "context": CONTEXT, "batch_size": 6}
    whole, n_bytes = heldout_batches(corpus, **sizes)
    shares = [heldout_batches(corpus, **sizes, process_index=p, process_count=3) for p in range(3)]
    assert {n for _, n in shares} == {n_bytes}
    for i, batch in enumerate(whole):
        together = np.concatenate([batches[i].tokens_BT for batches, _ in shares])
        assert np.array_equal(together, batch.tokens_BT)


def test_rows_hold_little_padding(corpus):
    batches, _ = heldout_batches(corpus, **ALL, context=CONTEXT, batch_size=1)
    assert np.mean([b.segment_ids_BT > 0 for b in batches]) > 0.9


def test_a_cap_takes_whole_documents_from_the_front(corpus):
    texts = heldout_texts(corpus, **ALL)
    sizes = [len(text.encode()) for text in texts]
    for count in (1, 3, 7):
        cap = sum(sizes[:count])
        for room in (0, sizes[count] - 1):
            assert heldout_texts(corpus, tokenizer=BYTES, max_bytes=cap + room) == texts[:count]
    assert heldout_texts(corpus, tokenizer=BYTES, max_bytes=0) == texts[:1]  # never none


def test_nothing_held_out_is_an_error(open_texts):
    with pytest.raises(UserError, match="no held-out document"):
        heldout_texts(open_texts(TEXTS, heldout=0.0), **ALL)


def test_token_files_are_counted_in_bytes_of_text(open_file):
    ids = [i for text in TEXTS for i in [*text.encode(), 257]]
    corpus = open_file("bin", "x.bin", np.array(ids, np.uint16).tobytes(), heldout=0.5)
    texts = heldout_texts(corpus, **ALL)
    batches, n_bytes = heldout_batches(corpus, **ALL, context=CONTEXT, batch_size=2)
    assert set(texts) <= set(TEXTS)
    assert sum(b.weights_BT.sum() for b in batches) == n_bytes + len(texts)


def test_token_files_count_bytes_that_are_no_text(open_file):
    """0xff is one byte; decoded it would be the three of U+FFFD."""
    ids = np.full(400, 255, np.uint16)
    ids[np.cumsum(np.arange(28))] = 257  # documents of different lengths, lest they be copies
    corpus = open_file("bin", "x.bin", ids.tobytes(), heldout=0.3)
    batches, n_bytes = heldout_batches(corpus, **ALL, context=32, batch_size=2)
    assert n_bytes == sum(int(np.sum(b.weights_BT * (b.targets_BT < 256))) for b in batches)


def test_a_tokenizer_that_loses_text_is_named(open_texts, bpe_path, tmp_path):
    corpus = open_texts(["the Cat sat", "the mat", "THE END", "more"], heldout=0.5)
    kept = make_tokenizer(str(bpe_path))
    assert lossy(corpus, make_tokenizer("bytes")) == lossy(corpus, kept) == ""
    content = json.loads(bpe_path.read_text()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "lower.json").write_text(json.dumps(content))
    changed = [t for t in corpus.parts[0].heldout if t != t.lower()]
    assert changed
    said = f"does not give back {len(changed)} of {len(corpus.parts[0].heldout)} held-out documents"
    assert said in lossy(corpus, make_tokenizer(str(tmp_path / "lower.json")))


def test_packing_is_best_fit_longest_first():
    rng = np.random.default_rng(0)
    pieces = [np.full(n, i + 1) for i, n in enumerate(rng.integers(1, 34, size=300))]
    rows = _pack(pieces, 33, 4)
    room, where = np.full(300, 33), {}
    for i in sorted(range(300), key=lambda i: -len(pieces[i])):
        fits = np.where(room >= len(pieces[i]), room, 99)
        where[i] = int(np.argmin(fits))
        room[where[i]] -= len(pieces[i])
    for i, row in where.items():
        assert i + 1 in rows.tokens[row]


def _probability(counts, history, symbol):
    """The interpolation as its definition reads, one dictionary of counts an order."""
    if history is None:
        total = sum(counts[0].values())
        return (counts[0].get((symbol,), 0) + 1) / (total + 257)
    lower = _probability(counts, history[1:] if len(history) > 1 else None, symbol)
    order = counts[len(history)]
    following = {k: n for k, n in order.items() if k[:-1] == history}
    if not following:
        return lower
    total, kinds = sum(following.values()), len(following)
    return (following.get((*history, symbol), 0) + kinds * lower) / (total + kinds)


def test_baselines_meet_their_formulas(open_texts):
    texts = [f"{i} bottles of beer on the wall" for i in range(12)]
    corpus = open_texts(texts, heldout=0.4)
    counts = [{}, {}, {}]
    for text in corpus.parts[0].train:
        symbols = [256, 256, *text.encode(), 256]
        for i in range(2, len(symbols)):
            for order in range(3):
                key = tuple(symbols[i - order : i + 1])
                counts[order][key] = counts[order].get(key, 0) + 1
    bits, n_bytes = {"unigram": 0.0, "trigram": 0.0}, 0
    for text in heldout_texts(corpus, **ALL):
        symbols = [256, 256, *text.encode(), 256]
        n_bytes += len(symbols) - 3
        for i in range(2, len(symbols)):
            bits["unigram"] -= math.log2(_probability(counts, None, symbols[i]))
            history = tuple(symbols[i - 2 : i])
            bits["trigram"] -= math.log2(_probability(counts, history, symbols[i]))
    found = baseline_bits(corpus, **ALL)
    for name, value in bits.items():
        assert found[name] == pytest.approx(value / n_bytes, rel=1e-9)


def test_trigram_counts_add_up_over_chunks():
    documents = [bytes([i % 7] * (i % 5)) for i in range(50)]
    counts = _trigram_counts(documents)
    assert counts.sum() == sum(len(d) + 1 for d in documents)
    assert counts[256, 256].sum() == len(documents)


def test_baselines_of_the_stdlib_have_the_known_order(make_config):
    """Trigrams beat single bytes, and compressors with long memory beat trigrams."""
    from mlmoe.data import open_corpus

    corpus = open_corpus(make_config(heldout=0.05), BYTES)
    bits = baseline_bits(corpus, tokenizer=BYTES, max_bytes=300_000)
    assert bits["xz"] < bits["zlib"] < bits["trigram"] < bits["unigram"] < 8
    assert bits["xz"] > 1.0 and bits["unigram"] < 5.5
