"""Encoding is lossless, adds nothing, and never makes a control token out of text."""

import json

import numpy as np
import pytest

from mlmoe.data import check_vocab, make_tokenizer
from mlmoe.errors import UserError

TEXTS = [
    "",
    "def f(x):\n\treturn  x\r\n",
    "naïve café — 漢字 🙂 e\u0301",
    "the cat sat on the mat " * 9,
]
SPELLED = "a <|bos|><|endoftext|> b</s><s>"


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    spec = "bytes" if request.param == "bytes" else str(request.getfixturevalue("bpe_path"))
    return make_tokenizer(spec)


@pytest.mark.parametrize("text", [*TEXTS, SPELLED])
def test_round_trip_as_int32(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert not set(ids.tolist()) & {tokenizer.bos_id, tokenizer.eos_id}
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_bytes_are_bytes():
    tokenizer = make_tokenizer("bytes")
    assert tokenizer.encode("é!").tolist() == list("é!".encode())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)


def test_decode_never_raises(tokenizer):
    cases = ([], [-1, 10**9], [tokenizer.bos_id, tokenizer.eos_id], np.zeros((2, 0), np.int32))
    assert [tokenizer.decode(ids) for ids in cases] == ["", "", "", ""]
    first_byte = tokenizer.encode("漢")[:1]
    assert "\ufffd" in tokenizer.decode(first_byte)


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(UserError, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_hugging_face_uses_the_control_tokens_of_the_file(bpe_path):
    tokenizer = make_tokenizer(str(bpe_path))
    size = len(json.loads(bpe_path.read_text())["model"]["vocab"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, size)


def test_control_tokens_not_marked_special_stay_out_of_text(bpe_path, tmp_path):
    content = json.loads(bpe_path.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "plain.json").write_text(json.dumps(content))
    tokenizer = make_tokenizer(str(tmp_path / "plain.json"))
    assert not set(tokenizer.encode(SPELLED).tolist()) & {0, 1}


def test_a_file_without_control_tokens_gets_two_ids_above_its_vocabulary(bpe_path, tmp_path):
    content = json.loads(bpe_path.read_text())
    content["added_tokens"] = []
    content["post_processor"] = None
    (tmp_path / "bare.json").write_text(json.dumps(content))
    tokenizer = make_tokenizer(str(tmp_path / "bare.json"))
    n = len(content["model"]["vocab"])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (n, n + 1, n + 2)
    assert tokenizer.decode([n, *tokenizer.encode("the cat"), n + 1]) == "the cat"


def test_a_model_that_spells_its_control_token_gets_new_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0), ("<", -9.0), (" ", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0, False))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "unigram.json"))
    tokenizer = make_tokenizer(str(tmp_path / "unigram.json"))
    assert tokenizer.eos_id >= 6 and tokenizer.bos_id != tokenizer.eos_id
    assert tokenizer.eos_id not in tokenizer.encode("a </s> b")


def test_models_that_cannot_encode_are_named(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    no_token = tokenizers.Tokenizer(tokenizers.models.BPE())
    no_unknown = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    no_token.save(str(tmp_path / "no_token.json"))
    no_unknown.save(str(tmp_path / "no_unknown.json"))
    with pytest.raises(UserError, match=r"no_token\.json: the tokenizer has no token"):
        make_tokenizer(str(tmp_path / "no_token.json"))
    with pytest.raises(UserError, match=r"no_unknown\.json: the tokenizer cannot encode"):
        make_tokenizer(str(tmp_path / "no_unknown.json")).encode("b")


def test_fingerprints_differ(bpe_path, tmp_path):
    (tmp_path / "other.json").write_text(bpe_path.read_text() + "\n")
    specs = ("bytes", str(bpe_path), str(tmp_path / "other.json"))
    assert len({make_tokenizer(spec).fingerprint for spec in specs}) == 3


def test_missing_and_broken_files_and_packages(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="neither 'bytes' nor"):
        make_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not a Hugging Face tokenizer"):
        make_tokenizer(str(tmp_path / "broken.json"))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[data\]'"):
        make_tokenizer(str(tmp_path / "broken.json"))


def test_check_vocab_names_the_next_multiple_of_128():
    check_vocab(make_tokenizer("bytes"), 258)
    with pytest.raises(UserError, match=r"--config\.model\.vocab=384"):
        check_vocab(make_tokenizer("bytes"), 257)
