"""The gate: reference values, its bounds, and finite gradients however extreme the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bounded_decay import bounded_log_decay


def test_reference(golden, error):
    case = golden("gate")
    args = [jnp.asarray(case[n], jnp.float32) for n in ("z", "a_log", "bias")]
    g, vjp = jax.vjp(bounded_log_decay, *args)
    assert error(g, case["g"]) < 1e-5
    grads = vjp(jnp.asarray(case["dg"], jnp.float32))
    for name, got in zip(("dz", "da_log", "dbias"), grads, strict=True):
        assert error(got, case[name]) < 1e-4, name


@pytest.mark.parametrize("a_log", [-100.0, -20.0, 10.0, 20.0, 100.0])
def test_extremes_stay_in_bounds_with_finite_gradients(a_log):
    z = jnp.array([-50.0, -1.0, 0.0, 1.0, 50.0]).reshape(1, 5, 1, 1)
    args = z, jnp.array([a_log]), jnp.zeros((1, 1))
    value, vjp = jax.vjp(bounded_log_decay, *args)
    assert np.all((value >= -5) & (value <= 0))
    grads = vjp(jnp.ones_like(value))
    assert all(np.isfinite(np.asarray(x)).all() for x in grads)
    # Even their squares, which a global gradient norm sums.
    assert all(np.isfinite(np.sum(np.asarray(x) ** 2)) for x in grads)


def test_slow_decays_keep_their_relative_precision():
    """A memory of 1e6 tokens needs g = -1e-6, where 1 - exp(g) rounds away in bf16."""
    z = np.log(1 / (5e6 - 1))  # g = -5 sigmoid(z) = -1e-6
    g = bounded_log_decay(jnp.full((1, 1, 1, 1), z), jnp.zeros(1), jnp.zeros((1, 1)))
    assert abs(float(g[0, 0, 0, 0]) / -1e-6 - 1) < 1e-5


def test_bf16_logits_give_an_f32_gate():
    z = jnp.ones((1, 2, 3, 4), jnp.bfloat16)
    assert bounded_log_decay(z, jnp.zeros(3), jnp.zeros((3, 4))).dtype == jnp.float32


def test_what_is_no_array_of_floats_is_named():
    good = {"z_BTHK": jnp.ones((1, 1, 1, 1)), "a_log_H": jnp.zeros(1), "bias_HK": jnp.zeros((1, 1))}
    for change, says in (
        ({"z_BTHK": [1.0]}, "z is list"),
        ({"z_BTHK": jnp.ones((1, 1, 1, 1), jnp.int32)}, "z is int32"),
        ({"z_BTHK": jnp.ones((1, 1, 1))}, r"z has shape \(1, 1, 1\); expected"),
        ({"a_log_H": 0.0}, "a_log is float"),
    ):
        with pytest.raises(ValueError, match=says):
            bounded_log_decay(**good | change)


@pytest.mark.parametrize("g_min", [-5.5, 0.0, 1.0, float("nan"), "a"])
def test_a_bound_the_tiles_cannot_hold_is_refused(g_min):
    with pytest.raises(ValueError, match=f"g_min={g_min}"):
        bounded_log_decay(jnp.ones((1, 1, 1, 1)), jnp.zeros(1), jnp.zeros((1, 1)), g_min)
