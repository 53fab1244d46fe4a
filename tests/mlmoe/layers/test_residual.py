"""Residuals over depth: the reference, and that a fresh one is a plain mean or nothing at all."""

import jax
import jax.numpy as jnp
import numpy as np

from mlmoe.layers.residual import DepthRead, WindowSum, depth_softmax
from tests.golden import load


def test_depth_softmax_meets_the_reference() -> None:
    ref = load("attn_res_block")
    sources = list(ref["sources"])
    y = depth_softmax(sources, ref["w"], ref["gain"], 1e-5)
    np.testing.assert_allclose(y, ref["y"], rtol=1e-4, atol=1e-6)
    zero = depth_softmax(sources, 0 * ref["w"], ref["gain"], 1e-5)
    np.testing.assert_allclose(zero, ref["y_zero_w"], rtol=1e-5, atol=1e-6)


def test_a_fresh_read_is_the_mean_of_its_sources() -> None:
    sources = list(jax.random.normal(jax.random.key(0), (3, 2, 5, 8)))
    y, _ = DepthRead(1e-5).init_with_output(jax.random.key(1), sources)
    np.testing.assert_allclose(y, sum(sources) / 3, atol=1e-6)


def test_a_fresh_window_adds_nothing_but_learns() -> None:
    outputs = list(jax.random.normal(jax.random.key(0), (2, 1, 4, 8)))
    module = WindowSum(jnp.dtype("float32"))
    y, params = module.init_with_output(jax.random.key(1), outputs)
    np.testing.assert_array_equal(y, 0.0)
    params = jax.tree.map(lambda p: p.unbox(), params, is_leaf=lambda x: hasattr(x, "unbox"))
    grad = jax.grad(lambda p: jnp.sum(module.apply(p, outputs)))(params)
    assert float(jnp.abs(grad["params"]["w_proj"]).min()) > 0.0
