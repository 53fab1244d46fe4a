"""Balance rules against their definitions and references, and the report of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers import balance
from mlmoe.layers.balance import max_violation, quantile, quantile_sign, sign
from mlmoe.layers.router import BINS, RouterStats, at_place, place
from tests.golden import load
from tests.mlmoe.layers.test_router import logits_of, moe_config, routing_of, run


def stats_of(load_E: Any) -> RouterStats:
    """Statistics with these loads and nothing else."""
    load_E = jnp.asarray(load_E, jnp.int32)
    margin_EB = jnp.zeros((*load_E.shape, 0), jnp.int32)
    zero = jnp.zeros(load_E.shape[:-1], jnp.int32)
    logits = jnp.zeros((*zero.shape, 4))
    return RouterStats(load_E, margin_EB, zero, zero, zero, logits, zero)


def exact_quantile(margin_NE: np.ndarray, k: int) -> np.ndarray:
    """The definition, by sorting: b_j = (q+1)-th smallest margin of expert j, q = N k / E."""
    new_E = np.sort(margin_NE, axis=0)[margin_NE.shape[0] * k // margin_NE.shape[1]]
    return new_E - new_E.mean()


def test_quantile_sign_meets_the_reference() -> None:
    ref = load("quantile_sign")
    for load_E, want in zip(ref["load"], ref["next_bias"], strict=True):
        got = quantile_sign(jnp.asarray(ref["bias"]), stats_of(load_E), rate=float(ref["delta"]))
        np.testing.assert_allclose(got, want, atol=1e-8)


def test_sign_moves_every_bias_towards_the_mean_load() -> None:
    got = sign(jnp.zeros(4), stats_of([9, 1, 5, 5]), rate=0.5)
    np.testing.assert_array_equal(got, [-0.5, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(60, 8, 3), (17, 5, 2), (1, 4, 1), (100, 7, 6)])
def test_fractional_shares_stay_within_a_bin_of_the_sort(shape: tuple[int, int, int]) -> None:
    N, E, k = shape
    s_NE = np.random.default_rng(2).uniform(size=(N, E)).astype(np.float32)
    live_N = jnp.ones(N, bool)
    alpha_N = -np.sort(-s_NE, axis=1)[:, k]
    for kind, margin_NE in (("quantile", alpha_N[:, None] - s_NE), ("capacity", -s_NE)):
        stats = run(logits_of(s_NE), jnp.zeros(E), live_N, k, kind)[2]
        want = exact_quantile(margin_NE, k)
        np.testing.assert_allclose(
            jax.jit(quantile)(jnp.zeros(E), stats), want, atol=2.1 * 2 / BINS
        )


@pytest.mark.parametrize("kind", ["quantile", "capacity", "quantile_sign", "sign", "none"])
def test_nothing_real_leaves_the_bias_alone(kind: str) -> None:
    b_E = jnp.arange(8.0)
    stats = run(jnp.zeros((5, 8)), b_E, jnp.zeros(5, bool), 2, kind)[2]
    update = balance.make_update(moe_config(experts=8, active=2, balance=kind))
    np.testing.assert_array_equal(update(b_E, stats), b_E)


@pytest.mark.parametrize("kind", ["quantile", "sign", "none"])
def test_quantile_balances_skewed_experts_in_three_steps(kind: str) -> None:
    """An eighth of 65,536 tokens and of 896 experts, 16 of them active."""
    E, A, N = 112, 2, 8192
    rng = np.random.default_rng(0)
    skew_E, b_E, seen = rng.normal(size=E), jnp.zeros(E), []
    update = jax.jit(balance.make_update(moe_config(experts=E, active=A, balance=kind)))
    for _ in range(3):
        logits_NE = (rng.normal(size=(N, E)) + skew_E).astype(np.float32)
        stats = run(logits_NE, b_E, jnp.ones(N, bool), A, kind)[2]
        seen.append(float(max_violation(stats.load_E)))
        b_E = update(b_E, stats)
    assert seen[0] > 5.0
    assert (seen[-1] < 0.5) == (kind == "quantile"), seen


@pytest.mark.parametrize(
    ("E", "A", "mean", "width"),
    [(64, 4, 7.0, 1.0), (64, 4, -7.0, 1.0), (64, 4, 0.0, 1e-3), (64, 4, -4.0, 1e-2)],
)
def test_quantile_balances_scores_that_hardly_differ(
    E: int, A: int, mean: float, width: float
) -> None:
    """Saturated sigmoids and narrow logits, beside the same rule by an exact sort in float64."""
    rng, N = np.random.default_rng(1), 4096
    skew_E, b_E, exact_E = rng.normal(size=E) * width, jnp.zeros(E), np.zeros(E)
    for _ in range(5):
        logits_NE = (rng.normal(size=(N, E)) * width + skew_E + mean).astype(np.float32)
        stats = run(logits_NE, b_E, jnp.ones(N, bool), A)[2]
        s_NE = 1 / (1 + np.exp(-logits_NE.astype(float)))
        order_NE = np.argsort(-(s_NE + exact_E), axis=1)
        load_E = np.bincount(order_NE[:, :A].ravel(), minlength=E)
        alpha_N1 = np.take_along_axis(s_NE + exact_E, order_NE[:, A : A + 1], 1)
        b_E, exact_E = quantile(b_E, stats), exact_quantile(alpha_N1 - s_NE, A)
    assert float(max_violation(stats.load_E)) < load_E.max() / load_E.mean() - 1 + 0.15


def test_places_of_margins_rise_and_can_be_undone() -> None:
    b_E = jnp.asarray([-0.3, 0.0, 1e-6, 0.3])
    margin_NE = jnp.sort(
        jax.random.uniform(jax.random.key(0), (500, 4), minval=-1.3, maxval=1.3), 0
    )
    near_NE = b_E[None] + jnp.linspace(-1e-4, 1e-4, 101)[:, None]
    for m_NE in (margin_NE, near_NE):
        u_NE = place(m_NE, b_E)
        assert float(u_NE.min()) >= 0 and float(u_NE.max()) <= BINS
        assert float(jnp.diff(u_NE, axis=0).min()) >= 0
        back_NE = jax.vmap(at_place, (0, None))(u_NE, b_E)
        np.testing.assert_allclose(back_NE, m_NE, atol=1e-6)
    # Nowhere is a bin wider than an even one; at the bias it is a thousandth of that.
    assert float((place(b_E[None] + 1e-4, b_E) - place(b_E[None], b_E)).min()) > 10


def test_what_a_buffer_did_not_send_does_not_move_the_bias() -> None:
    """The router chose those experts: they are in the load already."""
    logits = jax.random.normal(jax.random.key(0), (256, 16)) + jnp.arange(16.0)[None] / 8
    stats = run(logits, jnp.zeros(16), jnp.ones(256, bool), 2)[2]
    full = stats._replace(unsent=jnp.int32(200))
    np.testing.assert_array_equal(quantile(jnp.zeros(16), stats), quantile(jnp.zeros(16), full))


def test_the_temperature_goes_from_first_to_final_in_a_line() -> None:
    config = moe_config(experts=4, active=2, temperature=2.0, temperature_final=1.0, balance="none")
    routing = balance.first_routing(config, 3)
    np.testing.assert_array_equal(routing.temperature, 2.0)
    stats = stats_of(jnp.ones((3, 4)))
    for done in (0.5, 1.0):
        routing = balance.next_routing(config, routing, stats, jnp.asarray(done))
        np.testing.assert_allclose(routing.temperature, 2.0 - done)
    assert routing.without_capacity().bias.shape == (3, 4)


def test_the_report_of_a_known_load() -> None:
    load_LE = jnp.asarray([[8, 0, 4, 4], [4, 4, 4, 4]])
    routing = balance.first_routing(moe_config(experts=4, active=2), 2)
    stats = stats_of(load_LE)._replace(logits=jnp.asarray([[4.0, 4.0, 40.0, 4.0]] * 2))
    got = balance.report(stats, routing, jnp.asarray([[4, 4, 4, 4]] * 2))
    np.testing.assert_allclose(got.max_vio, [1.0, 0.0])
    np.testing.assert_allclose(got.max_min, [8.0, 1.0])
    np.testing.assert_allclose(got.share_variance, [0.5, 0.0])
    np.testing.assert_array_equal(got.dead, [1, 0])
    np.testing.assert_array_equal(got.starved, [1, 0])
    np.testing.assert_allclose(got.jitter, [0.25, 0.0])
    np.testing.assert_allclose(got.logit_mean, 1.0)
    np.testing.assert_allclose(got.logit_width, 3.0)  # mean 1, mean square 10
    first = balance.report(stats, routing, jnp.zeros((2, 4), jnp.int32))
    np.testing.assert_array_equal(first.jitter, 0.0)  # before the first step nothing was anywhere


def test_starvation_names_the_temperature_that_would_help() -> None:
    assert "a temperature of 8 would help" in balance.starvation_advice(0.0, 8.0, 1.0)
    assert "a temperature of 3 would help" in balance.starvation_advice(-9.0, 1.0, 1.0)
    assert "will not help" in balance.starvation_advice(1.0, 1.1, 1.0)
    assert "will not help" in balance.starvation_advice(0.0, 0.0, 1.0)


def test_starvation_is_said_once_and_again_when_it_grows() -> None:
    watch = balance.Starvation(experts=100)
    found = []
    for starved in (0.0, 5.0, 8.0, 9.0, 13.0):
        values = {
            "layer_starved": [0.0, starved],
            "layer_logit_mean": [0.0, 1.0],
            "layer_logit_width": [1.0, 6.0],
            "layer_temperature": [1.0, 1.0],
            "tokens": 64.0,
            "bad_in_a_row": 0.0,
        }
        found.append(watch.look(values))
    assert [bool(text) for text in found] == [False, False, True, False, True]
    assert "layer 1: 8 of 100" in found[2] and "temperature of 6" in found[2]
    assert balance.Starvation(100).look({"loss": 1.0}) == ""  # no experts in the model
    assert balance.Starvation(100).look(values | {"tokens": 0.0}) == ""


def test_a_learned_temperature_is_a_parameter_with_a_gradient() -> None:
    from tests.mlmoe.layers.test_latent_moe import reference_layer

    layer, params, ref = reference_layer(temperature_learned=True)
    params = params | {"log_temperature": jnp.zeros(())}
    document_BT = jnp.ones((1, len(ref["x"])), int)

    def total(log_temperature):  # type: ignore[no-untyped-def]
        p = params | {"log_temperature": log_temperature}
        routing = routing_of(ref["bias"])
        y, _ = layer.apply({"params": p}, ref["x"][None], document_BT, routing)
        return jnp.sum(y**2)

    assert abs(float(jax.jit(jax.grad(total))(jnp.zeros(())))) > 1e-4
