"""Makers of small configs, corpora and tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlmoe.data import Corpus, DataConfig, make_tokenizer, open_corpus


@pytest.fixture
def make_config() -> Callable[..., DataConfig]:
    def make(**changes) -> DataConfig:
        values = {
            "source": "stdlib",
            "path": "",
            "mixture": (),
            "text_field": "text",
            "tokenizer": "bytes",
            "packing": "split",
            "pack_bins": 4,
            "join_files": False,
            "long_rows": 0.0,
            "heldout": 0.0,
            "on_bad": "raise",
            "max_line_mb": 1,
            "bin_dtype": "uint16",
            "prefetch": 0,
        }
        return DataConfig(**{**values, **changes})

    return make


@pytest.fixture
def open_file(make_config, tmp_path) -> Callable[..., Corpus]:
    """Writes `content` under `name` and opens it as the whole corpus."""

    def opened(source: str, name: str, content: bytes, **changes) -> Corpus:
        (tmp_path / name).write_bytes(content)
        config = make_config(source=source, path=str(tmp_path / name), **changes)
        return open_corpus(config, make_tokenizer("bytes"))

    return opened


@pytest.fixture
def open_texts(make_config, tmp_path) -> Callable[..., Corpus]:
    """A jsonl corpus of the given documents."""

    def opened(texts: list[str], name: str = "texts.jsonl", **changes) -> Corpus:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        config = make_config(source="jsonl", path=str(path), **changes)
        return open_corpus(config, make_tokenizer("bytes"))

    return opened


@pytest.fixture(scope="session")
def bpe_path(tmp_path_factory) -> Path:
    """A byte-level BPE with one ordinary and two control tokens, and traps switched on."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|bos|>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat " * 20], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
