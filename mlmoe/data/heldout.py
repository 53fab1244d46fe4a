"""Held-out batches: finite, every byte of every held-out document counted exactly once.

A document of n bytes is [bos] b_1 ... b_n [eos]: n + 1 targets under a byte tokenizer. Long
documents are cut into pieces of `context` + 1 tokens that share one token, so no target is
lost or counted twice, and the pieces are packed best-fit, longest first. The rows depend on
the context alone, so that

    bits per byte = sum(weights * loss in nats) / (ln 2 * n_bytes)

is the same for every batch size.
"""

import bisect
import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from mlmoe.data.batch import Batch
from mlmoe.data.documents import Document
from mlmoe.data.packing import OpenRows, to_batch
from mlmoe.data.pipeline import check_sizes, encode_document
from mlmoe.data.sources import Corpus
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError

LOOK = 32  # held-out documents of a source that `lossy` encodes


def heldout_texts(corpus: Corpus, *, tokenizer: Tokenizer, max_bytes: int) -> list[str]:
    """Whole held-out documents in hash order, up to `max_bytes` of UTF-8 (at least one).

    The order is random in effect, so a cap is an unbiased sample. It ends at the first
    document that does not fit: going on with smaller ones would favour short documents.
    The sources of a mixture have their weights' shares of the bytes, as in training: a share of the
    documents would leave next to nothing of one with few and long documents.
    """
    return [text for _, text in _chosen(corpus, tokenizer, max_bytes)]


def heldout_batches(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    context: int,
    batch_size: int,
    max_bytes: int,
    process_index: int = 0,
    process_count: int = 1,
) -> tuple[list[Batch], int]:
    """Batches of the documents of `heldout_texts`, and their number of UTF-8 bytes.

    Each batch has `batch_size // process_count` rows; the last is filled up with padding of
    weight 0. Every process gets the same number of batches, and n_bytes counts all of them.
    """
    check_sizes(context, batch_size, 0, process_count)
    chosen = list(_chosen(corpus, tokenizer, max_bytes))
    pieces = [
        piece
        for document, _ in chosen
        for piece in cut(encode_document(tokenizer, document), context + 1)
    ]
    rows = _pack(pieces, context + 1, batch_size)
    size = batch_size // process_count
    batches = []
    for first in range(0, len(rows.tokens), batch_size):
        mine = range(first + process_index * size, first + (process_index + 1) * size)
        batches.append(to_batch([rows.row(r) for r in mine]))
    return batches, sum(_text_bytes(tokenizer, document) for document, _ in chosen)


def lossy(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """What to say of a tokenizer that does not give back held-out text; '' if it does.

    Bits per byte counts the bytes of the text, so what a tokenizer drops would come for free.
    """
    looked, changed = 0, 0
    for part in corpus.parts:
        for document in itertools.islice(part.heldout, LOOK):
            if isinstance(document, str) and document:
                looked += 1
                changed += tokenizer.decode(tokenizer.encode(document)) != document
    if not changed:
        return ""
    return (
        f"the tokenizer does not give back {changed} of {looked} held-out documents as they were; "
        "what it drops or merges costs no bits, so bits/byte is lower than the text deserves"
    )


def sampled_bytes_per_token(corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Bytes of text a target of training, where there are no held-out documents to count."""
    n_bytes = tokens = 0
    for part in corpus.parts:
        for document in itertools.islice(part.train, LOOK):
            n_bytes += _text_bytes(tokenizer, document)
            tokens += max(0, len(encode_document(tokenizer, document)) - 1)
    return n_bytes / max(1, tokens)


def cut(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Pieces of at most `length` tokens, each starting with the last token of the one before."""
    starts = range(0, max(len(tokens) - 1, 0), length - 1)
    return [tokens[start : start + length] for start in starts]


def _chosen(corpus: Corpus, tokenizer: Tokenizer, max_bytes: int) -> Iterator[tuple[Document, str]]:
    """(document as stored, its text) of the sample that `heldout_texts` describes."""
    waiting = [(0.0, number, iter(part.heldout)) for number, part in enumerate(corpus.parts)]
    total = 0
    while waiting:
        taken, number, documents = heapq.heappop(waiting)
        document = next(documents, None)
        if document is None:
            continue
        size = _text_bytes(tokenizer, document)
        heapq.heappush(waiting, (taken + size / corpus.parts[number].weight, number, documents))
        if not len(document):
            continue
        text = document if isinstance(document, str) else tokenizer.decode(document)
        total += size
        if total > max_bytes and total > size:
            return
        yield document, text
    if not total:
        raise UserError("no held-out document; set data.heldout above 0, for example 0.05")


def _text_bytes(tokenizer: Tokenizer, document: Document) -> int:
    return len(document.encode()) if isinstance(document, str) else tokenizer.count_bytes(document)


def _pack(pieces: list[np.ndarray], length: int, batch_size: int) -> OpenRows:
    """Best fit of the pieces, longest first, into a multiple of `batch_size` rows."""
    row_of = np.zeros(len(pieces), np.int64)
    used = 0
    rows_with: dict[int, list[int]] = {}  # room -> heap of the rows that have it
    rooms: list[int] = []  # its keys, ascending
    for i in sorted(range(len(pieces)), key=lambda i: -len(pieces[i])):
        at = bisect.bisect_left(rooms, len(pieces[i]))
        if at < len(rooms):
            room = rooms[at]
            row = heapq.heappop(rows_with[room])
            if not rows_with[room]:
                del rows_with[room], rooms[at]
        else:
            room, row = length, used
            used += 1
        row_of[i] = row
        left = room - len(pieces[i])
        if left and left not in rows_with:
            rows_with[left] = []
            bisect.insort(rooms, left)
        if left:
            heapq.heappush(rows_with[left], row)
    rows = OpenRows(-(-used // batch_size) * batch_size, length)
    for piece, where in zip(pieces, row_of, strict=True):
        rows.put(int(where), piece)
    return rows
