"""Scoring and loss by position: of models that say what they are told, and of a real one."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe.config import ModelConfig, from_dict
from mlmoe.data.batch import Batch
from mlmoe.data.documents import BadDocuments
from mlmoe.data.sources import Corpus, Part, Subset
from mlmoe.data.tasks import Example, evaluation_example
from mlmoe.data.tokenizers import ByteTokenizer
from mlmoe.layers.balance import first_routing
from mlmoe.layers.router import Routing
from mlmoe.model import Model, make_model
from mlmoe.sharding import make_mesh
from mlmoe.task_eval import (
    ANSWERS,
    Evaluator,
    Score,
    answer_batch,
    long_pieces,
    make_answer_step,
    make_position_step,
    position_edges,
    rows_at,
)

W = 264
ROUTING = Routing(jnp.zeros((1, 4)), jnp.ones(1), jnp.full(1, 1.0))


def nothing() -> None:
    """Never stops."""


def telling(wrong: Any) -> Model:
    """A model that says the target, but another token where `wrong(batch)` [B, T] is true."""

    def apply(params: Any, routing: Routing, batch: Batch) -> Any:
        assert params == {} and routing.capacity.shape == (1,)
        said_BT = jnp.where(wrong(batch), (batch.targets_BT + 1) % 258, batch.targets_BT)
        return jax.nn.one_hot(said_BT, W), jnp.eye(W), None

    return Model(lambda key: {}, apply, {})


def scored(model: Model, examples: list[Example], length: int, devices: int = 1) -> Score:
    mesh = make_mesh(jax.devices()[:devices])
    evaluator = Evaluator(model, {}, ROUTING, mesh)
    rows = rows_at(length, min(3, len(examples)), mesh)
    step = evaluator.compile_answers(rows, length, 258)
    return evaluator.score(step, examples, rows, length, nothing)


def made(name: str, length: int, count: int) -> list[Example]:
    return [evaluation_example(name, length, seed=0, number=i) for i in range(count)]


@pytest.mark.parametrize("devices", [1, 8])
def test_a_model_that_knows_is_right_and_one_that_does_not_is_wrong(devices: int) -> None:
    """Seven examples in batches of three, or of eight, of which some rows are padding."""
    examples = made("stack", 1000, 7) + made("passkey", 400, 4)  # more answers than one look; few
    answers = sum(int(e.answer.sum()) for e in examples)
    assert max(int(e.answer.sum()) for e in examples) > ANSWERS
    never = telling(lambda batch: jnp.zeros_like(batch.targets_BT, bool))
    always = telling(lambda batch: jnp.ones_like(batch.targets_BT, bool))
    assert scored(never, examples, 1000, devices) == Score(11, 11, answers, answers)
    assert scored(always, examples, 1000, devices) == Score(11, 0, answers, 0)


def test_one_wrong_token_makes_a_wrong_answer_and_others_are_not_asked() -> None:
    examples = made("mqar", 300, 9)
    last = telling(lambda batch: batch.targets_BT == 200)
    wrong = [(e.tokens[e.answer] == 200) for e in examples]
    expected_right = sum(not w.any() for w in wrong)
    assert 0 < expected_right < 9
    answers = sum(map(len, wrong))
    assert scored(last, examples, 300) == Score(
        9, expected_right, answers, answers - sum(int(w.sum()) for w in wrong)
    )
    # Wrong everywhere but at the answers, which are all above 127 in this task.
    noise = telling(lambda batch: batch.targets_BT < 128)
    assert scored(noise, examples, 300).accuracy == 1.0


def test_ids_that_the_tokenizer_lacks_are_never_the_answer() -> None:
    def apply(params: Any, routing: Routing, batch: Batch) -> Any:
        said_BTW = jax.nn.one_hot(batch.targets_BT, W) + 2.0 * (jnp.arange(W) >= 258)[None, None]
        return said_BTW, jnp.eye(W), None

    model = Model(lambda key: {}, apply, {})
    assert scored(model, made("passkey", 300, 3), 300).accuracy == 1.0


def test_the_standard_error_is_never_zero() -> None:
    assert Score(100, 30, 1, 1).error == pytest.approx(math.sqrt(0.3 * 0.7 / 100), rel=0.01)
    assert Score(32, 32, 1, 1).error == pytest.approx(Score(32, 0, 1, 0).error)
    assert 0.01 < Score(32, 0, 1, 0).error < 0.03


def test_no_array_holds_logits_of_a_whole_row() -> None:
    T = 8192

    def apply(params: Any, routing: Routing, batch: Batch) -> Any:
        return jnp.ones((*batch.tokens_BT.shape, 4)), jnp.ones((4, W)), None

    model = Model(lambda key: {}, apply, {})
    batch, at_BA = answer_batch([], 1, T)
    traced = (
        jax.make_jaxpr(make_answer_step(model, 258))({}, ROUTING, batch, at_BA),
        jax.make_jaxpr(make_position_step(model, W))({}, ROUTING, batch),
    )
    for jaxpr in traced:
        assert max(sizes(jaxpr.jaxpr)) <= T * W // 8


def sizes(jaxpr: Any) -> list[int]:
    """Elements of every array that a computation makes, inner ones too."""
    found = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values()))]
    for p in inner:
        p = getattr(p, "jaxpr", p)
        found += sizes(p) if hasattr(p, "eqns") else []
    return found


class Real(NamedTuple):
    """A model of one layer with experts, and the logits [64, W] it gives for a row alone."""

    evaluator: Evaluator  # on 8 devices
    row_logits: Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def real() -> Real:
    """In training an expert takes no more than the mean. The head is drawn anew, as if trained."""
    c = configs.load("8k:tiny").model
    c.update(d_model=16, layout="L", layers=1)
    c.attention.update(heads=1, head_dim=8, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=2, v_dim=8)
    c.moe.update(dense_layers=0, experts=4, active=2, latent=8, hidden=12, shared_hidden=16)
    c.moe.update(balance="capacity", capacity_factor=1.0, reroutes=1)
    config = from_dict(ModelConfig, c.to_dict())
    model = make_model(config)
    routing = first_routing(config.moe, config.moe_layers)
    assert float(routing.capacity[0]) == 1.0
    params = jax.jit(model.init)(jax.random.key(0))
    params["head"] = jax.random.normal(jax.random.key(1), params["head"].shape)
    apply = jax.jit(model.apply)

    def row_logits(tokens: np.ndarray) -> np.ndarray:
        batch, _ = answer_batch([Example(tokens, np.zeros(len(tokens), bool))], 1, 64)
        x_BTD, head_DW, _ = apply(params, routing.without_capacity(), batch)
        return np.asarray(x_BTD[0]) @ np.asarray(head_DW)

    return Real(Evaluator(model, params, routing, make_mesh()), row_logits)


def test_a_real_model_scores_as_all_logits_of_each_row_do(real: Real) -> None:
    """Some tokens are put where the model wants them, so that some answers are right."""
    examples = made("palindrome", 60, 5)
    hits = 0
    for i, example in enumerate(examples):
        said_T = np.argmax(real.row_logits(example.tokens)[:, :258], axis=-1)
        if i < 3:
            last = np.flatnonzero(example.answer)[-1]
            example.answer[:last] = False  # only the last, where a change moves nothing before it
            example.tokens[last] = said_T[last - 1]
        said = said_T[: len(example.tokens) - 1]
        hits += int((example.tokens[1:] == said)[example.answer[1:]].sum())
    step = real.evaluator.compile_answers(8, 64, 258)
    score = real.evaluator.score(step, examples, 8, 64, nothing)
    assert score == Score(5, 3, sum(int(e.answer.sum()) for e in examples), hits)


def test_positions_have_the_loss_of_each_row_alone(real: Real) -> None:
    """Ten rows fill no eight twice; the vocabulary goes through in three chunks."""
    texts = [np.random.default_rng(i).integers(0, 256, 65).astype(np.int32) for i in range(10)]
    step = real.evaluator.compile_positions(8, 64, 88)
    found = real.evaluator.loss_by_position(step, texts, 8, nothing)
    logits = np.stack([real.row_logits(text) for text in texts]).astype(np.float64)
    target = np.take_along_axis(logits, np.stack(texts)[:, 1:, None], axis=-1)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=-1)) - target
    expected = [nats[:, a:b].mean() for a, b in itertools.pairwise(found.edges)]
    assert found.rows == 10
    np.testing.assert_allclose(found.nats, expected, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 8])
def test_buckets_and_their_error_over_rows(devices: int) -> None:
    """Nats that are known: of row r and position t, log(1 + e^-(r + t / 1000))."""

    def apply(params: Any, routing: Routing, batch: Batch) -> Any:
        row_B1 = batch.tokens_BT[:, :1].astype(jnp.float32)
        gap_BT = row_B1 + batch.positions_BT / 1000
        sign_BT = jnp.where(batch.targets_BT == 1, 1.0, -1.0)
        x_BTD = jnp.stack([gap_BT * sign_BT, jnp.zeros_like(gap_BT)], axis=-1)
        return x_BTD, jnp.array([[0.0, 1.0], [0.0, 0.0]]), None

    model = Model(lambda key: {}, apply, {})
    texts = [np.array([r, *[1] * 2500]) for r in range(4)]
    evaluator = Evaluator(model, {}, ROUTING, make_mesh(jax.devices()[:devices]))
    rows = 3 if devices == 1 else 8
    step = evaluator.compile_positions(rows, 2500, 2)
    found = evaluator.loss_by_position(step, texts, rows, nothing)
    nats = np.log1p(np.exp(-(np.arange(4)[:, None] + np.arange(2500)[None] / 1000)))
    for first, last, mean, error in zip(
        found.edges, found.edges[1:], found.nats, found.error, strict=False
    ):
        each = nats[:, first:last].mean(axis=1)
        assert mean == pytest.approx(each.mean(), rel=1e-5)
        assert error == pytest.approx(each.std(ddof=1) / 2, rel=1e-4)
    alone = evaluator.loss_by_position(step, texts[:1], rows, nothing)
    assert alone.rows == 1 and np.isnan(alone.error).all()


def test_edges_are_two_an_octave_and_hold_every_power_of_two() -> None:
    assert position_edges(64).tolist() == [0, 8, 11, 16, 23, 32, 45, 64]
    assert position_edges(100).tolist() == [0, 8, 11, 16, 23, 32, 45, 64, 91, 100]
    assert [position_edges(n).tolist() for n in (1, 8, 9)] == [[0, 1], [0, 8], [0, 8, 9]]
    edges = position_edges(2**20)
    assert (np.diff(edges) > 0).all() and set(2 ** np.arange(3, 21)) <= set(edges.tolist())


def test_only_whole_pieces_of_long_documents_are_taken() -> None:
    texts = ["a" * 5, "b" * 98, "c" * 250, "d" * 2000]
    documents = Subset(texts, np.arange(4), BadDocuments("raise"))  # type: ignore[arg-type]
    part = Part("texts", 1.0, texts, documents, documents)  # type: ignore[arg-type]
    corpus = Corpus(None, (part,), BadDocuments("raise"))  # type: ignore[arg-type]
    pieces, longest = long_pieces(corpus, ByteTokenizer(), 99, 50)
    assert [chr(p[5]) for p in pieces] == ["b", "c", "c", "d", "d", "d", "d"]
    assert all(len(p) == 100 for p in pieces) and longest == 2002
    assert pieces[1][-1] == pieces[2][0] and pieces[0][0] == 256
    assert len(long_pieces(corpus, ByteTokenizer(), 99, 2)[0]) == 2
    assert long_pieces(corpus, ByteTokenizer(), 5000, 2) == ([], 2002)


def test_batches_are_small_and_divide_over_the_devices() -> None:
    one, eight = make_mesh(jax.devices()[:1]), make_mesh()
    assert [rows_at(n, 32, one) for n in (256, 1024, 8192, 131_072)] == [32, 8, 1, 1]
    assert [rows_at(n, 5, eight) for n in (256, 131_072)] == [8, 8]
    assert rows_at(256, 20, eight) == 24
