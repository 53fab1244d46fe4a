"""Text to token ids and back: raw bytes, or a Hugging Face tokenizer.json.

Encoding adds no control tokens and never makes one: text that spells a control token, such
as `<|endoftext|>`, stays text. The pipeline adds bos and eos itself.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlmoe.errors import UserError

_BOS_NAMES = ("<s>", "<bos>", "<|bos|>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>")
_EOS_NAMES = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|end_of_text|>", "<|endoftext|>")


class Tokenizer(Protocol):
    """`encode(text)` gives int32 [n]; `decode(ids)` never raises; ids are below vocab_size."""

    vocab_size: int
    bos_id: int
    eos_id: int
    fingerprint: str
    bytes_per_token: float  # of text, about: where lengths in tokens are wanted before encoding
    read_threads: int  # worth using for encoding: 0 where encoding is as cheap as a copy

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Any) -> str: ...

    def count_bytes(self, ids: np.ndarray) -> int: ...  # of UTF-8 text that the ids stand for


def make_tokenizer(spec: str) -> Tokenizer:
    """'bytes', or the path of a Hugging Face tokenizer.json."""
    return ByteTokenizer() if spec == "bytes" else HuggingFaceTokenizer(spec)


def check_vocab(tokenizer: Tokenizer, model_vocab: int) -> None:
    """Raises UserError where the tokenizer makes ids that the model has no row for."""
    if tokenizer.vocab_size > model_vocab:
        nearest = -(-tokenizer.vocab_size // 128) * 128  # a multiple of 128 fills TPU lanes
        chunk = max(c for c in range(128, min(nearest, 16_384) + 1, 128) if nearest % c == 0)
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model's vocabulary holds "
            f"{model_vocab:,}; set --config.model.vocab={nearest} "
            f"--config.model.vocab_chunk={chunk}"
        )


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is bos, 257 is eos."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257
    fingerprint = "bytes"
    bytes_per_token = 1.0
    read_threads = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """Control and unknown ids are left out; incomplete UTF-8 becomes U+FFFD."""
        flat = np.asarray(ids).reshape(-1)
        kept = flat[(flat >= 0) & (flat < 256)].astype(np.uint8)
        return kept.tobytes().decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        return int(np.sum(ids < 256))  # decoding would make three bytes of each one it cannot read


class HuggingFaceTokenizer:
    """A tokenizer.json, used without its post-processor, truncation and padding.

    bos and eos are added tokens of the usual names. Where there is none, or where the file's
    model would still produce it from plain text, a new id above the vocabulary is used: the
    model's vocabulary must hold `vocab_size` ids, which counts them.
    """

    bytes_per_token = 4.0  # of English with 32k ids and more; code has fewer
    read_threads = 8  # the Rust encoder runs outside Python's lock

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError:
            message = f"data.tokenizer={path!r} needs the tokenizers package"
            raise UserError(f"{message}: pip install -e '.[data]'") from None
        file = Path(path).expanduser()
        if not file.is_file():
            message = f"data.tokenizer={path!r} is neither 'bytes' nor"
            raise UserError(f"{message} a tokenizer.json that exists")
        data = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_with_special_ends(data))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path}: not a Hugging Face tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.fingerprint = f"sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"{path}: the tokenizer has no token")
        self._path, self._known = path, max(vocab.values()) + 1
        self.vocab_size = self._known
        self.bos_id = self._control_id(_BOS_NAMES)
        self.eos_id = self._control_id(_EOS_NAMES)

    def _control_id(self, names: tuple[str, ...]) -> int:
        added = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        for name in names:
            if name in added and added[name] not in self.encode(f"a {name}{name} b"):
                return added[name]
        self.vocab_size += 1
        return self.vocab_size - 1

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{self._path}: the tokenizer cannot encode: {error}") from None
        return np.array(ids, np.int32)

    def decode(self, ids: Any) -> str:
        """bos, eos and unknown ids are left out; incomplete UTF-8 becomes U+FFFD."""
        flat = np.asarray(ids).reshape(-1)
        kept = (flat >= 0) & (flat < self._known) & (flat != self.bos_id) & (flat != self.eos_id)
        return self._tokenizer.decode(flat[kept].tolist(), skip_special_tokens=False)

    def count_bytes(self, ids: np.ndarray) -> int:
        return len(self.decode(ids).encode())


def _with_special_ends(data: bytes) -> str:
    """The file with bos and eos marked special: only special tokens can be kept out of text."""
    content = json.loads(data)
    for token in content.get("added_tokens", ()):
        if token["content"] in _BOS_NAMES + _EOS_NAMES:
            token["special"] = True
    return json.dumps(content)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        bad = f"{text[error.start]!r} at character {error.start}"
        raise UserError(f"the text holds a lone surrogate, {bad}, which is no text") from None
