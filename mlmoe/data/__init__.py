"""Text to batches: sources, tokenizers, packing, held-out evaluation, fingerprints.

    tokenizer = make_tokenizer(config.tokenizer)
    corpus = open_corpus(config, tokenizer)
    batches = train_batches(corpus, tokenizer=tokenizer, context=256, batch_size=16, seed=0)

Names are imported when first used, so that reading a config loads neither grain nor JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlmoe.data.baselines import baseline_bits as baseline_bits
    from mlmoe.data.batch import Batch as Batch
    from mlmoe.data.config import DataConfig as DataConfig
    from mlmoe.data.heldout import heldout_batches as heldout_batches
    from mlmoe.data.heldout import heldout_texts as heldout_texts
    from mlmoe.data.pipeline import train_batches as train_batches
    from mlmoe.data.resume_check import describe_difference as describe_difference
    from mlmoe.data.resume_check import fingerprint as fingerprint
    from mlmoe.data.sources import Corpus as Corpus
    from mlmoe.data.sources import open_corpus as open_corpus
    from mlmoe.data.tokenizers import Tokenizer as Tokenizer
    from mlmoe.data.tokenizers import check_vocab as check_vocab
    from mlmoe.data.tokenizers import make_tokenizer as make_tokenizer

_HOME = {
    "Batch": "batch",
    "Corpus": "sources",
    "DataConfig": "config",
    "Tokenizer": "tokenizers",
    "baseline_bits": "baselines",
    "check_vocab": "tokenizers",
    "describe_difference": "resume_check",
    "fingerprint": "resume_check",
    "heldout_batches": "heldout",
    "heldout_texts": "heldout",
    "make_tokenizer": "tokenizers",
    "open_corpus": "sources",
    "train_batches": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
