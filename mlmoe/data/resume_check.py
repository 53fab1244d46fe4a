"""What decides the sequence of batches, as a flat dict to save beside the iterator's state.

An iterator's state is a few counters: set into another pipeline it is accepted in silence and
gives other data. Compare fingerprints first.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

from mlmoe.data.documents import Loaded, content_bytes
from mlmoe.data.sources import Corpus, Part
from mlmoe.data.tokenizers import Tokenizer

Fingerprint = dict[str, str | int | float]

# Where files lie and how far ahead they are read changes no batch; nor does on_bad, since a run
# that raises never gets past the document. source, mixture and tokenizer are described in full.
_LEFT_OUT = {"path", "prefetch", "on_bad", "source", "mixture", "tokenizer"}


def fingerprint(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    context: int,
    batch_size: int,
    seed: int,
    process_count: int = 1,
) -> Fingerprint:
    """Names to values (JSON-able); equal fingerprints mean equal batches in equal order."""
    found: Fingerprint = {
        f"data.{field.name}": getattr(corpus.config, field.name)
        for field in dataclasses.fields(corpus.config)
        if field.name not in _LEFT_OUT
    }
    for number, part in enumerate(corpus.parts):
        found[f"data.corpus.{number}"] = _describe(part)
        found[f"data.weight.{number}"] = part.weight
    found["data.tokenizer"] = f"{tokenizer.fingerprint}, {tokenizer.vocab_size} ids"
    found["data.context"] = context
    found["data.batch_size"] = batch_size
    found["data.seed"] = seed
    found["data.process_count"] = process_count
    return found


def describe_difference(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line for each value that differs, such as 'data.seed: 0 -> 1'; empty if none does."""
    names = [*old, *(name for name in new if name not in old)]
    return [
        f"{name}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in names
        if old.get(name) != new.get(name) or (name in old) != (name in new)
    ]


def _describe(part: Part) -> str:
    """Size and SHA-256 of names and contents; of names and sizes where it is not in memory."""
    documents = part.documents
    digest = hashlib.sha256()
    if isinstance(documents, Loaded):
        for index, document in enumerate(documents):
            data = content_bytes(document)
            digest.update(f"{documents.name(index)}\0{len(data)}\0".encode())
            digest.update(data)
    else:
        digest.update(repr(documents.files).encode())
    size = f"{len(documents):,} documents, {documents.n_bytes:,} bytes"
    return f"{part.name.split(':')[0]}, {size}, sha256 {digest.hexdigest()[:16]}"
