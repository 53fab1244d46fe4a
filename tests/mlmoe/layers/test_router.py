"""Routing against the float64 reference: who is chosen, with what weight, and what is counted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from mlmoe.config import MoEConfig, from_dict
from mlmoe.layers.balance import max_violation, quantile
from mlmoe.layers.router import (
    BINS,
    RouterStats,
    Routing,
    _matmul_count,
    _scatter_count,
    route,
)
from tests.golden import load


def moe_config(**changes: Any) -> MoEConfig:
    c = configs.load("8k:tiny").model.moe
    c.update(changes)
    return from_dict(MoEConfig, c.to_dict())


def routing_of(bias_E: Any, temperature: float = 1.0, capacity: float = np.inf) -> Routing:
    values = (bias_E, temperature, capacity)
    return Routing(*(jnp.asarray(x, jnp.float32) for x in values))


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(
    logits_NE: Any, bias_E: Any, live_N: Any, active: int, balance: str = "quantile"
) -> tuple[jax.Array, jax.Array, RouterStats]:
    """route() of one row of tokens."""
    config = moe_config(experts=logits_NE.shape[1], active=active, balance=balance)
    return route(config, routing_of(bias_E), logits_NE[None], live_N[None])


def logits_of(scores: np.ndarray) -> np.ndarray:
    s = scores.astype(np.float64)
    return np.log(s / (1 - s)).astype(np.float32)


@pytest.mark.parametrize("step", range(4))
def test_routes_and_quantile_step_meet_the_reference(step: int) -> None:
    ref = load("quantile_balancing")
    s_NE, b_E, k = ref["scores"][step], ref["bias"][step], int(ref["top_k"])
    experts, weights, stats = run(logits_of(s_NE), b_E, jnp.ones(len(s_NE), bool), k)
    np.testing.assert_array_equal(experts, ref["experts"][step])
    np.testing.assert_allclose(weights, ref["weights"][step], rtol=1e-5)
    np.testing.assert_array_equal(stats.load_E, ref["load"][step])
    width = (b_E.max() - b_E.min() + 2) / BINS
    np.testing.assert_allclose(quantile(b_E, stats), ref["next_bias"][step], atol=width)


def test_padding_is_never_counted_and_never_routed() -> None:
    logits = jax.random.normal(jax.random.key(0), (40, 8))
    live_N = jnp.arange(40) < 24
    for balance in ("quantile", "capacity", "aux_loss"):
        experts, weights, stats = run(logits, jnp.zeros(8), live_N, 2, balance)
        _, _, alone = run(logits[:24], jnp.zeros(8), live_N[:24], 2, balance)
        assert stats.load_E.dtype == jnp.int32
        np.testing.assert_array_equal(experts[24:], -1)
        np.testing.assert_array_equal(weights[24:], 0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stats, alone)


@pytest.mark.parametrize("balance", ["quantile", "capacity"])
def test_statistics_add_up_over_micro_batches(balance: str) -> None:
    logits, b_E = jax.random.normal(jax.random.key(1), (64, 8)), jnp.linspace(-0.1, 0.1, 8)
    live_N = jnp.ones(16, bool)
    parts = [run(logits[i : i + 16], b_E, live_N, 2, balance)[2] for i in range(0, 64, 16)]
    total = jax.tree.map(lambda *x: sum(x), *parts)
    assert int(total.load_E.sum()) + int(total.dropped) == 128
    whole = run(logits, b_E, jnp.ones(64, bool), 2, balance)[2]
    np.testing.assert_array_equal(total.margin_EB.sum(1), 64)
    if balance == "quantile":
        np.testing.assert_array_equal(total.load_E, whole.load_E)
        np.testing.assert_array_equal(total.margin_EB, whole.margin_EB)


@pytest.mark.parametrize("N", [1, 511, 512, 1300])
def test_counting_by_matmul_is_counting(N: int) -> None:
    bin_NE = jax.random.randint(jax.random.key(N), (N, 3), -1, BINS)
    got = _matmul_count(bin_NE)
    np.testing.assert_array_equal(got, _scatter_count(bin_NE))
    assert got.dtype == jnp.int32


def test_weights_ignore_the_bias_and_the_bias_gets_no_gradient() -> None:
    logits, live_N = jax.random.normal(jax.random.key(3), (16, 8)), jnp.ones(16, bool)

    def total(b_E):  # type: ignore[no-untyped-def]
        return jnp.sum(run(logits, b_E, live_N, 2)[1] ** 2)

    np.testing.assert_array_equal(jax.grad(total)(jnp.linspace(-1.0, 1.0, 8)), 0.0)
    experts, weights, _ = run(logits, jnp.linspace(-1.0, 1.0, 8), live_N, 2)
    s = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, 1))
    np.testing.assert_allclose(weights, s / s.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("E", "A"), [(8, 2), (16, 3), (896, 16)])
def test_equal_scores_are_spread_over_the_experts(E: int, A: int) -> None:
    """A router of zeros must not send every token to experts 0 .. A-1."""
    T = 4 * -(-E // A)
    experts, weights, stats = run(jnp.zeros((T, E)), jnp.zeros(E), jnp.ones(T, bool), A)
    np.testing.assert_allclose(weights, 1 / A, rtol=1e-6)
    assert all(len(set(row)) == A for row in np.asarray(experts).tolist())
    assert float(max_violation(stats.load_E)) < 0.5


@pytest.mark.parametrize("mean", [0.0, -8.0])
@pytest.mark.parametrize("width", [1.0, 0.05])
def test_the_tie_break_moves_nothing_else(mean: float, width: float) -> None:
    """Nor does a token's place count: a document has the same experts wherever it is packed."""
    logits = mean + width * jax.random.normal(jax.random.key(5), (300, 896))
    logits = logits.at[7].set(0.0)  # one token whose scores are all equal
    whole = run(logits, jnp.zeros(896), jnp.ones(300, bool), 16)[0]
    want = jax.lax.top_k(jax.nn.sigmoid(logits), 16)[1]
    np.testing.assert_array_equal(jnp.sort(whole[8:]), jnp.sort(want[8:]))
    assert sorted(whole[7].tolist()) == list(range(7 * 16, 8 * 16))
    moved = run(logits[8:], jnp.zeros(896), jnp.ones(292, bool), 16)[0]
    np.testing.assert_array_equal(jnp.sort(whole[8:]), jnp.sort(moved))


@pytest.mark.parametrize("level", [0.0, 40.0])
def test_equal_scores_stay_in_balance(level: float) -> None:
    """Of a router that is zero, or saturated: an update may not spoil what the turns balance."""
    bias_E = jnp.zeros(896)
    for _ in range(4):
        _, _, stats = run(jnp.full((448, 896), level), bias_E, jnp.ones(448, bool), 16)
        assert float(max_violation(stats.load_E)) == 0.0
        bias_E = quantile(bias_E, stats)


@pytest.mark.parametrize("balance", ["quantile", "aux_loss"])
@pytest.mark.parametrize("level", [-60.0, -200.0, 200.0])
def test_saturated_scores_keep_weights_and_finite_gradients(level: float, balance: str) -> None:
    logits, live_N = level + jax.random.normal(jax.random.key(8), (16, 8)), jnp.arange(16) < 12
    logits = jnp.where(live_N[:, None], logits, jnp.nan)

    def total(x):  # type: ignore[no-untyped-def]
        _, weights, stats = run(x, jnp.zeros(8), live_N, 2, balance)
        return jnp.sum(weights[:, 0]) + stats.aux

    _, weights, _ = run(logits, jnp.zeros(8), live_N, 2, balance)
    np.testing.assert_allclose(jnp.sum(weights, 1), live_N, rtol=1e-5)
    assert np.isfinite(np.asarray(jax.grad(total)(logits))).all()


def test_without_capacity_nobody_is_refused() -> None:
    config = moe_config(experts=8, active=2, balance="capacity")
    logits = jax.random.normal(jax.random.key(9), (2, 16, 8)) + jnp.arange(8.0)[None, None]
    live_BT = jnp.ones((2, 16), bool)
    tight = routing_of(jnp.zeros(8), capacity=1.0)
    for routing, moved in ((tight, True), (tight.without_capacity(), False)):
        assert bool(route(config, routing, logits, live_BT)[2].rerouted > 0) == moved


def test_temperature_divides_the_logits() -> None:
    logits, live_BT = jax.random.normal(jax.random.key(6), (1, 16, 8)), jnp.ones((1, 16), bool)
    config = moe_config(experts=8, active=2)
    hot = route(config, routing_of(jnp.zeros(8), temperature=4.0), logits, live_BT)
    same = route(config, routing_of(jnp.zeros(8)), logits / 4, live_BT)
    jax.tree.map(np.testing.assert_array_equal, hot[:2], same[:2])
    np.testing.assert_allclose(hot[2].logits[3] / hot[2].logits[0], 4.0)


def test_the_balancing_loss_is_the_tokens_when_balanced_and_has_a_gradient() -> None:
    live_N = jnp.ones(32, bool)
    even = run(jnp.zeros((32, 8)), jnp.zeros(8), live_N, 2, "aux_loss")[2]
    np.testing.assert_allclose(even.aux, 32.0, rtol=1e-5)
    logits = jax.random.normal(jax.random.key(7), (32, 8)) + jnp.arange(8.0)[None]
    aux = lambda x: run(x, jnp.zeros(8), live_N, 2, "aux_loss")[2].aux  # noqa: E731
    assert float(aux(logits)) > 1.1 * 32
    assert float(aux(logits - 0.1 * jax.grad(aux)(logits))) < float(aux(logits))
