"""Training batches: shuffle, share out, encode, pack, mix, batch, prefetch (grain throughout).

Every epoch of a source is its own permutation of the documents, a function of the seed and
the epoch alone. Process p of P takes documents p, p + P, p + 2P, ... of that endless order,
so processes share no document of an epoch and never run out. A mixture mixes *rows* by
weight, so weights are shares of the tokens, not of the documents.
"""

import functools

import grain
import numpy as np

from mlmoe.data.batch import Batch
from mlmoe.data.documents import Document, Subset
from mlmoe.data.packing import PackedRows, to_batch
from mlmoe.data.sources import Corpus, Part
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError

LONG = 0.75  # of a row: documents from there on are long ones (data.long_rows)


def train_batches(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    context: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """An endless iterator over batches of `batch_size // process_count` rows of `context`.

    `get_state()` is a small JSON-able dict; `set_state()` continues bit for bit, but only
    where nothing of the fingerprint has changed (see resume_check.py). Raises UserError for
    sizes that do not divide; a bad document found in mid-run raises here too.
    """
    check_sizes(context, batch_size, seed, process_count)
    config = corpus.config
    rows, weights = [], []
    for number, part in enumerate(corpus.parts):
        for key, documents, weight in buckets(part, number, tokenizer, context, config.long_rows):
            share = slice(process_index, None, process_count)
            stream = document_stream(documents, seed=seed, key=key)[share]
            encoded = stream.map(functools.partial(encode_document, tokenizer))
            weights.append(weight)
            rows.append(
                PackedRows(
                    encoded,
                    packing=config.packing,
                    bins=config.pack_bins,
                    length=context + 1,
                    give_up=len(documents) + 1,
                    read_threads=tokenizer.read_threads,
                )
            )
    mixed = grain.IterDataset.mix(rows, weights) if len(rows) > 1 else rows[0]
    batches = mixed.batch(batch_size // process_count, batch_fn=to_batch)
    prefetch = grain.experimental.ThreadPrefetchIterDataset
    return iter(prefetch(batches, prefetch_buffer_size=config.prefetch))


Bucket = tuple[tuple[int, ...], Subset, float]  # key of its order, documents, share of the rows


def buckets(
    part: Part, number: int, tokenizer: Tokenizer, context: int, long_rows: float
) -> list[Bucket]:
    """The documents of part `number`, or those of at least LONG of a row and the shorter ones.

    Raises UserError where the lengths are not known, or no document is long.
    """
    documents = part.train
    if not long_rows:
        return [((number,), documents, part.weight)]
    sizes = documents.sizes()
    if sizes is None:
        raise UserError(
            f"data.long_rows={long_rows}: the lengths of {part.name}'s documents are not known "
            "without reading them all; set it to 0, or use jsonl"
        )
    bytes_per_token = tokenizer.bytes_per_token if isinstance(documents[0], str) else 1.0
    least = LONG * context * bytes_per_token
    long = documents.where(sizes >= least)
    short = documents.where(sizes < least)
    if not len(long):
        raise UserError(
            f"data.long_rows={long_rows}: the longest of {part.name}'s {len(documents):,} "
            f"documents has {sizes.max() / bytes_per_token:,.0f} tokens, a row {context:,}; set "
            "it to 0, or join files (data.join_files)"
        )
    if not len(short):
        return [((number,), documents, part.weight)]  # all rows are long ones
    found: list[Bucket] = [((number, 1), long, part.weight * long_rows)]
    if long_rows < 1:
        found.append(((number, 2), short, part.weight * (1 - long_rows)))
    return found


def document_stream(
    documents: Subset, *, seed: int, key: tuple[int, ...]
) -> grain.MapDataset[Document]:
    """The endless order of `documents`, over all processes; `key` tells orders apart."""
    # grain permutes epoch e by seed + e: hashing keeps seed 0's second epoch from being seed
    # 1's first.
    shuffle_seed = int(np.random.SeedSequence([seed, *key]).generate_state(1)[0])
    return grain.MapDataset.source(documents).shuffle(shuffle_seed).repeat()


def encode_document(tokenizer: Tokenizer, document: Document) -> np.ndarray:
    """[bos] + ids + [eos], int32; an empty document gives no token at all."""
    ids = tokenizer.encode(document) if isinstance(document, str) else document
    if not len(ids):
        return np.zeros(0, np.int32)
    ends = np.array([tokenizer.bos_id, tokenizer.eos_id], np.int32)
    return np.concatenate([ends[:1], ids, ends[1:]])


def check_sizes(context: int, batch_size: int, seed: int, process_count: int) -> None:
    """Raises UserError for sizes that give no batches."""
    if context < 2:  # three tokens always hold a target; two may be the end and start of documents
        raise UserError(f"context={context} must be at least 2")
    if batch_size < 1 or batch_size % process_count:
        nearest = max(1, round(batch_size / process_count)) * process_count
        message = f"batch_size={batch_size} must be a positive multiple of the {process_count}"
        raise UserError(f"{message} processes; nearest valid: {nearest}")
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")
