"""Bits per byte of models that need no training run, on the same held-out documents.

Symbols are the 256 bytes and the end of a document, 256, which is predicted as the model
predicts its eos; before a document stand two more 256s. With counts n from the training
documents and t(h) the number of different symbols seen after history h (Witten-Bell):

    p(c)      = (n(c) + 1) / (N + 257)
    p(c | b)  = (n(bc) + t(b) p(c)) / (n(b) + t(b))
    p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab))

bits per byte = -sum log2 p / bytes; for zlib and xz it is 8 * compressed / plain, each
document compressed alone.
"""

import itertools
import lzma
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from mlmoe.data.heldout import heldout_texts
from mlmoe.data.sources import Corpus
from mlmoe.data.tokenizers import Tokenizer

_SYMBOLS = 257
_END = 256
_TRAIN_BYTES = 64 * 2**20  # of training documents counted; more moves a trigram by < 1 %


def baseline_bits(corpus: Corpus, *, tokenizer: Tokenizer, max_bytes: int) -> dict[str, float]:
    """Name to bits per byte of unigram, trigram, zlib (level 9) and xz."""
    texts = heldout_texts(corpus, tokenizer=tokenizer, max_bytes=max_bytes)
    heldout = [text.encode() for text in texts]
    n_bytes = sum(map(len, heldout))
    counts = _trigram_counts(_training_bytes(corpus, tokenizer))
    unigram, trigram = _code_lengths(counts, heldout)
    return {
        "unigram": unigram / n_bytes,
        "trigram": trigram / n_bytes,
        "zlib": 8 * sum(len(zlib.compress(d, 9)) for d in heldout) / n_bytes,
        "xz": 8 * sum(len(lzma.compress(d)) for d in heldout) / n_bytes,
    }


def _training_bytes(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Training documents of all parts in turn, until there is enough to count."""
    total = 0
    for documents in itertools.zip_longest(*(part.train for part in corpus.parts)):
        for document in documents:
            if document is not None and total < _TRAIN_BYTES:
                text = document if isinstance(document, str) else tokenizer.decode(document)
                data = text.encode()
                total += len(data)
                yield data
        if total >= _TRAIN_BYTES:
            return


def _trigrams(documents: Iterable[bytes]) -> Iterator[np.ndarray]:
    """[n + 1] int64 codes a * 257^2 + b * 257 + c of each document's trigrams."""
    for data in documents:
        x = np.full(len(data) + 3, _END, np.int64)
        x[2:-1] = np.frombuffer(data, np.uint8)
        yield (x[:-2] * _SYMBOLS + x[1:-1]) * _SYMBOLS + x[2:]


def _trigram_counts(documents: Iterable[bytes]) -> np.ndarray:
    """[257, 257, 257] int64 counts n(abc)."""
    counts = np.zeros(_SYMBOLS**3, np.int64)
    codes: list[np.ndarray] = []
    waiting = 0
    for code in _trigrams(documents):
        codes.append(code)
        waiting += len(code)
        if waiting > 2**24:  # bounds memory; one bincount costs a pass over the whole table
            counts += np.bincount(np.concatenate(codes), minlength=len(counts))
            codes, waiting = [], 0
    if codes:
        counts += np.bincount(np.concatenate(codes), minlength=len(counts))
    return counts.reshape(_SYMBOLS, _SYMBOLS, _SYMBOLS)


def _code_lengths(n_abc: np.ndarray, documents: list[bytes]) -> tuple[float, float]:
    """Bits that the unigram and the trigram model need for the documents."""
    codes = np.concatenate(list(_trigrams(documents)))
    ab, c = np.divmod(codes, _SYMBOLS)
    b = ab % _SYMBOLS
    n_bc = n_abc.sum(axis=0)
    n_c = n_bc.sum(axis=0)
    p_c = (n_c + 1) / (n_c.sum() + _SYMBOLS)
    t_b = (n_bc > 0).sum(axis=1)
    p_bc = _mix(n_bc[b, c], n_bc.sum(axis=1)[b], t_b[b], p_c[c])
    table = n_abc.reshape(-1, _SYMBOLS)
    rows, row_of = np.unique(ab, return_inverse=True)  # only the histories that occur
    n_ab, t_ab = table[rows].sum(axis=1), (table[rows] > 0).sum(axis=1)
    p_abc = _mix(table[ab, c], n_ab[row_of], t_ab[row_of], p_bc)
    return -float(np.log2(p_c[c]).sum()), -float(np.log2(p_abc).sum())


def _mix(n: np.ndarray, total: np.ndarray, kinds: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """(n + t p) / (N + t), and p itself after a history that was never seen."""
    seen = total + kinds
    return np.where(seen > 0, (n + kinds * lower) / np.maximum(seen, 1), lower)
