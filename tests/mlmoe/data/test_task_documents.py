"""The source 'tasks': in a corpus, in batches, held out; and what it refuses."""

import numpy as np
import pytest

from mlmoe.data import (
    describe_difference,
    fingerprint,
    heldout_batches,
    heldout_texts,
    make_tokenizer,
    open_corpus,
    train_batches,
)
from mlmoe.data.task_documents import DOCUMENTS, TaskDocuments
from mlmoe.data.tasks import SHORTEST, TASKS, evaluation_example
from mlmoe.errors import UserError

BYTES = make_tokenizer("bytes")
MIXTURE = (("stdlib", "", 0.7), ("tasks", "passkey,needle_multi", 0.3))


@pytest.fixture(scope="module")
def documents():
    return TaskDocuments("passkey,needle_multi,mqar", 600, BYTES)


def test_documents_are_made_on_demand_and_always_the_same(documents):
    again = TaskDocuments(" passkey, needle_multi ,mqar:600", 999, BYTES)
    assert len(documents) == DOCUMENTS == len(set(documents.keys().tolist()))
    assert again.files == documents.files and again.n_bytes == documents.n_bytes
    for index in (0, 1, 2, 65_000, 65_535):
        assert np.array_equal(documents[index], again[index])
    assert [documents.name(i) for i in (0, 4)] == ["passkey:0", "needle_multi:4"]
    assert isinstance(documents[0], str) and documents[2].dtype == np.int32


def test_tasks_take_turns_and_lengths_are_log_uniform(documents):
    sizes = np.array([len(documents[i]) + 2 for i in range(1800)])
    for turn, name in enumerate(("passkey", "needle_multi", "mqar")):
        mine = sizes[turn::3]
        assert SHORTEST[name] - 40 < mine.min() < SHORTEST[name] + 9 and 560 < mine.max() <= 600
        middle = np.sqrt(SHORTEST[name] * 600)
        assert abs(np.mean(mine < middle) - 0.5) < 0.15
    assert sum(sizes) - 2 * len(sizes) == pytest.approx(documents.n_bytes * 1800 / DOCUMENTS, 0.1)


def test_a_tenth_of_the_examples_asks_for_what_stands_first():
    """With uniform depths that would be one in two hundred of these lengths, and go unlearnt."""
    documents = TaskDocuments("passkey", 4096, BYTES)
    long = [i for i in range(1500) if documents.sizes()[i] > 1500]
    first = [documents[i].startswith("Remember the pass key.\nThe pass key is") for i in long]
    assert 0.06 < np.mean(first) < 0.16


def test_no_document_is_an_example_of_the_evaluation():
    documents = TaskDocuments("passkey,parity:183", 256, BYTES)
    seen = {str(documents[i]) for i in range(4000)}
    for number in range(200):
        text = BYTES.decode(evaluation_example("passkey", 183, seed=0, number=number).tokens)
        assert text not in seen
        bits = evaluation_example("parity", 12, seed=0, number=number).tokens[1:-1]
        assert str(bits) not in seen


def test_a_mixture_trains_with_its_share_of_tasks(make_config):
    config = make_config(mixture=MIXTURE, packing="best_fit", heldout=0.05)
    corpus = open_corpus(config, BYTES, context=512)
    train, heldout = corpus.parts[1].train, corpus.parts[1].heldout
    assert len(train) + len(heldout) == DOCUMENTS and 3000 < len(heldout) < 3600
    assert not set(train.indices.tolist()) & set(heldout.indices.tolist())
    batches = train_batches(corpus, tokenizer=BYTES, context=512, batch_size=4, seed=0)
    rows = [row for _ in range(25) for row in next(batches).tokens_BT]
    tasks = [row for row in rows if b"Remember the" in bytes(row[row < 256].astype(np.uint8))]
    assert 0.2 < len(tasks) / len(rows) < 0.4
    assert "tasks:passkey,needle_multi: 62," in corpus.describe()
    state, follow = batches.get_state(), next(batches)
    batches.set_state(state)
    assert all(np.array_equal(a, b) for a, b in zip(follow, next(batches), strict=True))


def test_the_fingerprint_tells_tasks_and_lengths_apart(make_config):
    def taken(path, context):
        corpus = open_corpus(make_config(source="tasks", path=path), BYTES, context=context)
        return fingerprint(corpus, tokenizer=BYTES, context=64, batch_size=4, seed=0)

    first = taken("parity,modular", 64)
    assert first == taken("parity,modular:64", 128)
    for path, context in (("parity,modular", 65), ("parity", 64), ("modular,parity", 64)):
        (line,) = describe_difference(first, taken(path, context))
        assert line.startswith("data.corpus.0: tasks")


def test_held_out_examples_are_evaluated_like_text(make_config):
    config = make_config(source="tasks", path="passkey,stack", heldout=0.05)
    corpus = open_corpus(config, BYTES)
    batches, n_bytes = heldout_batches(
        corpus, tokenizer=BYTES, context=256, batch_size=4, max_bytes=20_000
    )
    texts = heldout_texts(corpus, tokenizer=BYTES, max_bytes=20_000)
    assert sum(b.weights_BT.sum() for b in batches) == n_bytes + len(texts)


def test_held_out_bytes_of_a_mixture_follow_its_weights(make_config):
    """By the share of the documents, 3,000 examples would drown 25 modules of the library."""
    corpus = open_corpus(make_config(mixture=MIXTURE, heldout=0.05), BYTES)
    texts = heldout_texts(corpus, tokenizer=BYTES, max_bytes=200_000)
    size = sum(map(len, texts))
    tasks = sum(len(text) for text in texts if text.startswith("Remember the"))
    assert size > 100_000 and abs(tasks / size - 0.3) < 0.1


@pytest.mark.parametrize(
    ("path", "context", "named"),
    [
        ("passkey,needle", 256, "no task 'needle'; choose from passkey, needle_single"),
        ("passkey", 100, "passkey does not fit in a context of 100 tokens; nearest valid: 183"),
        ("parity,passkey:99", 256, "passkey does not fit in a longest example of 99 tokens"),
        ("passkey:long", 256, "'long' is no whole number; write it as passkey:256"),
        ("passkey:", 256, "'' is no whole number"),
        ("passkey:2048", 256, "2048 tokens do not fit in rows of 256"),
        (",passkey", 256, "no task ''"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_opened(make_config, path, context, named):
    with pytest.raises(UserError) as raised:
        open_corpus(make_config(source="tasks", path=path), BYTES, context=context)
    assert named in str(raised.value)


def test_tasks_need_names_and_the_byte_tokenizer(make_config, bpe_path):
    with pytest.raises(UserError, match="names of tasks, such as 'passkey"):
        make_config(source="tasks")
    tokenizer = make_tokenizer(str(bpe_path))
    with pytest.raises(UserError, match=r"needs data.tokenizer='bytes'"):
        open_corpus(make_config(source="tasks", path="passkey"), tokenizer)
    assert set(SHORTEST) == set(TASKS)
