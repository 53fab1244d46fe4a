"""Routing and balance against the float64 reference, and what must never move the bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.router import BINS, RouterStats, max_violation, quantile, quantile_sign, route
from tests.golden import load


def logits_of(scores: np.ndarray) -> np.ndarray:
    s = scores.astype(np.float64)
    return np.log(s / (1 - s)).astype(np.float32)


def exact_quantile(s_NE: np.ndarray, b_E: np.ndarray, k: int) -> np.ndarray:
    """The definition, by sorting: b_j = (q+1)-th smallest of alpha - s_j, q = N k / E."""
    alpha_N = -np.sort(-(s_NE + b_E), axis=1)[:, k]
    new_E = np.sort(alpha_N[:, None] - s_NE, axis=0)[s_NE.shape[0] * k // s_NE.shape[1]]
    return new_E - new_E.mean()


@pytest.mark.parametrize("step", range(4))
def test_routes_and_quantile_step_meet_the_reference(step: int) -> None:
    ref = load("quantile_balancing")
    s_NE, b_E, k = ref["scores"][step], ref["bias"][step], int(ref["top_k"])
    live_N = jnp.ones(len(s_NE), bool)
    experts, weights, stats = route(logits_of(s_NE), b_E, live_N, k, 1.0)
    np.testing.assert_array_equal(experts, ref["experts"][step])
    np.testing.assert_allclose(weights, ref["weights"][step], rtol=1e-5)
    np.testing.assert_array_equal(stats.load_E, ref["load"][step])
    width = (b_E.max() - b_E.min() + 2) / BINS
    np.testing.assert_allclose(quantile(b_E, stats), ref["next_bias"][step], atol=width)


def test_quantile_sign_meets_the_reference() -> None:
    ref = load("quantile_sign")
    for load_E, want in zip(ref["load"], ref["next_bias"], strict=True):
        stats = RouterStats(jnp.asarray(load_E, jnp.int32), jnp.zeros((len(load_E), 1), jnp.int32))
        np.testing.assert_allclose(quantile_sign(jnp.asarray(ref["bias"]), stats), want, atol=1e-8)


def test_two_quantile_steps_balance_skewed_experts() -> None:
    rng = np.random.default_rng(0)
    skew_E, b_E, seen = rng.normal(size=32), jnp.zeros(32), []
    for _ in range(3):
        logits = rng.normal(size=(4096, 32)).astype(np.float32) + skew_E.astype(np.float32)
        _, _, stats = route(logits, b_E, jnp.ones(4096, bool), 4, 1.0)
        seen.append(float(max_violation(stats.load_E)))
        b_E = quantile(b_E, stats)
    assert seen[0] > 2.0 and seen[2] < 0.25, seen


def test_padding_is_never_counted_and_never_routed() -> None:
    logits = jax.random.normal(jax.random.key(0), (40, 8))
    live_N = jnp.arange(40) < 24
    experts, _, stats = route(logits, jnp.zeros(8), live_N, 2, 1.0)
    _, _, alone = route(logits[:24], jnp.zeros(8), live_N[:24], 2, 1.0)
    assert stats.load_E.dtype == jnp.int32
    np.testing.assert_array_equal(experts[24:], -1)
    jax.tree.map(np.testing.assert_array_equal, stats, alone)


def test_nothing_real_leaves_the_bias_alone() -> None:
    b_E = jnp.arange(8.0)
    _, _, stats = route(jnp.zeros((5, 8)), b_E, jnp.zeros(5, bool), 2, 1.0)
    np.testing.assert_array_equal(quantile(b_E, stats), b_E)


def test_statistics_add_up_over_micro_batches() -> None:
    logits, b_E = jax.random.normal(jax.random.key(1), (64, 8)), jnp.linspace(-0.1, 0.1, 8)
    whole = route(logits, b_E, jnp.ones(64, bool), 2, 1.0)[2]
    parts = [
        route(logits[i : i + 16], b_E, jnp.ones(16, bool), 2, 1.0)[2] for i in range(0, 64, 16)
    ]
    jax.tree.map(np.testing.assert_array_equal, whole, jax.tree.map(lambda *x: sum(x), *parts))


@pytest.mark.parametrize("shape", [(60, 8, 3), (17, 5, 2), (1, 4, 1), (100, 7, 6)])
def test_fractional_shares_stay_within_a_bin_of_the_sort(shape: tuple[int, int, int]) -> None:
    N, E, k = shape
    s_NE = np.random.default_rng(2).uniform(size=(N, E)).astype(np.float32)
    _, _, stats = route(logits_of(s_NE), jnp.zeros(E), jnp.ones(N, bool), k, 1.0)
    want = exact_quantile(s_NE, np.zeros(E), k)
    np.testing.assert_allclose(quantile(jnp.zeros(E), stats), want, atol=2.1 * 2 / BINS)


def test_weights_ignore_the_bias_and_the_bias_gets_no_gradient() -> None:
    logits = jax.random.normal(jax.random.key(3), (16, 8))

    def total(b_E):  # type: ignore[no-untyped-def]
        return jnp.sum(route(logits, b_E, jnp.ones(16, bool), 2, 1.0)[1] ** 2)

    np.testing.assert_array_equal(jax.grad(total)(jnp.linspace(-1.0, 1.0, 8)), 0.0)
    experts, weights, _ = route(logits, jnp.linspace(-1.0, 1.0, 8), jnp.ones(16, bool), 2, 1.0)
    s = jax.nn.sigmoid(jnp.take_along_axis(logits, experts, 1))
    np.testing.assert_allclose(weights, s / s.sum(1, keepdims=True), rtol=1e-6)


def test_equal_scores_go_to_the_lowest_experts() -> None:
    experts, weights, _ = route(jnp.zeros((3, 6)), jnp.zeros(6), jnp.ones(3, bool), 2, 1.0)
    np.testing.assert_array_equal(experts, [[0, 1]] * 3)
    np.testing.assert_array_equal(weights, 0.5)
