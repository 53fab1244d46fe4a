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
from mlmoe.data.documents import Document
from mlmoe.data.packing import PackedRows, to_batch
from mlmoe.data.sources import Corpus, Part
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError


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
    rows = []
    for number, part in enumerate(corpus.parts):
        share = slice(process_index, None, process_count)
        stream = document_stream(part, seed=seed, number=number)[share]
        encoded = stream.map(functools.partial(encode_document, tokenizer))
        rows.append(
            PackedRows(
                encoded,
                packing=config.packing,
                bins=config.pack_bins,
                length=context + 1,
                give_up=len(part.train) + 1,
                read_threads=tokenizer.read_threads,
            )
        )
    weights = [part.weight for part in corpus.parts]
    mixed = grain.IterDataset.mix(rows, weights) if len(rows) > 1 else rows[0]
    batches = mixed.batch(batch_size // process_count, batch_fn=to_batch)
    prefetch = grain.experimental.ThreadPrefetchIterDataset
    return iter(prefetch(batches, prefetch_buffer_size=config.prefetch))


def document_stream(part: Part, *, seed: int, number: int) -> grain.MapDataset[Document]:
    """The endless order of documents of the corpus' part `number`, over all processes."""
    # grain permutes epoch e by seed + e: hashing keeps seed 0's second epoch from being seed
    # 1's first.
    shuffle_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return grain.MapDataset.source(part.train).shuffle(shuffle_seed).repeat()


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
