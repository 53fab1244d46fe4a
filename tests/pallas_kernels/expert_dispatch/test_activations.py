"""`glu` against the float64 reference and against its own limits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_dispatch.activations import glu, parts

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    ("activation", "weights", "expected"),
    [
        ("four", ("w_gate", "w_gate2", "w_up"), "y_seed"),
        ("capped", ("w_gate", "w_up"), "y_capped"),
    ],
)
def test_reference(activation, weights, expected):
    case = np.load(GOLDEN / "situ_glu.npz")
    hidden = [jnp.asarray(case["x"] @ case[w], jnp.float32) for w in weights]
    y_ND = np.asarray(glu(hidden, activation), np.float64) @ case["w_down"]
    error = np.sqrt(np.mean((y_ND - case[expected]) ** 2) / np.mean(case[expected] ** 2))
    assert error < 1e-5


def test_capped_is_swiglu_near_zero_and_bounded_far_out():
    small = jnp.array([[1e-3, -2e-3], [3e-3, 1e-3]])
    np.testing.assert_allclose(glu(small, "capped"), glu(small, "swiglu"), rtol=1e-5)
    far = jnp.array([[1e4, -1e4, 60.0], [1e4, 1e4, -1e4]])
    np.testing.assert_allclose(glu(far, "capped"), [100.0, 0.0, -100.0], atol=1e-4)
    assert jnp.abs(glu(far, "swiglu")).max() > 1e6


@pytest.mark.parametrize("activation", ["four", "capped", "swiglu"])
def test_array_or_sequence_and_one_rounding(activation):
    hidden_PNF = jax.random.normal(jax.random.key(0), (parts(activation), 64, 8), jnp.bfloat16)
    y_NF = glu(hidden_PNF, activation)
    assert y_NF.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y_NF, glu(tuple(hidden_PNF), activation))
    exact_NF = glu(hidden_PNF.astype(jnp.float32), activation).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y_NF, exact_NF)


def test_order_of_the_parts_matters():
    z, z2, u = jax.random.normal(jax.random.key(1), (3, 5))
    by_hand = 1 / (1 + np.exp(-z)) * np.tanh(z2) * u
    np.testing.assert_allclose(glu([z, z2, u], "four"), by_hand, rtol=1e-5)
    np.testing.assert_allclose(glu([z, u], "swiglu"), z / (1 + np.exp(-z)) * u, rtol=1e-5)


def test_bad_input():
    with pytest.raises(ValueError, match=r"'capped' needs 2 projections, got 3"):
        glu(jnp.zeros((3, 4)), "capped")
    with pytest.raises(ValueError, match=r"'gelu'; the choices are four, capped, swiglu"):
        glu(jnp.zeros((2, 4)), "gelu")
