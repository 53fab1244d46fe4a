"""Both forms of the grouped products, the native one and the loop over blocks, against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_dispatch import grouped

COUNTS = {
    "one row": (1, [0, 1, 0]),
    "empty ends": (40, [0, 40, 0]),
    "nothing": (9, [0, 0, 0]),
    "idle rows": (23, [5, 0, 11]),
    "window at the end": (67, [64, 1, 2]),
    "blocks and one over": (200, [65, 64, 63]),
    "one takes all": (300, [0, 0, 300]),
}


def _case(rows, counts, P=2, K=5, F=7):
    rng = np.random.default_rng(rows)
    x_MK, w_EPKF = rng.normal(size=(rows, K)), rng.normal(size=(len(counts), P, K, F))
    return x_MK, w_EPKF, rng.normal(size=(P, rows, F))


def _loop(x_MK, w_EPKF, counts, dy_PMF):
    """The definition, in float64."""
    y_PMF, dx_MK, dw_EPKF = np.zeros_like(dy_PMF), np.zeros_like(x_MK), np.zeros_like(w_EPKF)
    for e, stop in enumerate(np.cumsum(counts)):
        for m in range(stop - counts[e], stop):
            y_PMF[:, m] = np.einsum("k,pkf->pf", x_MK[m], w_EPKF[e])
            dx_MK[m] = np.einsum("pf,pkf->k", dy_PMF[:, m], w_EPKF[e])
            dw_EPKF[e] += np.einsum("k,pf->pkf", x_MK[m], dy_PMF[:, m])
    return y_PMF, dx_MK, dw_EPKF


@pytest.mark.parametrize("form", ["block", "ragged"])
@pytest.mark.parametrize(("rows", "counts"), COUNTS.values(), ids=COUNTS)
def test_against_a_loop(form, rows, counts):
    x_MK, w_EPKF, dy_PMF = _case(rows, counts)
    expected = _loop(x_MK, w_EPKF, counts, dy_PMF)
    args = [jnp.asarray(a, jnp.float32) for a in (x_MK, w_EPKF)] + [jnp.asarray(counts, jnp.int32)]
    y = jax.jit(getattr(grouped, f"_{form}_dot"))(*args)
    dy = tuple(jnp.asarray(dy_PMF, jnp.float32))
    gradients = jax.jit(getattr(grouped, f"_{form}_pullback"))(*args, dy)
    for got, want in zip((jnp.stack(y), *gradients), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_bad_row_stays_in_its_group():
    """NaN in group 1 shares a 16-row window with groups 0 and 2 and must reach neither."""
    counts_E = jnp.array([20, 3, 20], jnp.int32)
    x_MK, w_EPKF, dy_PMF = (jnp.asarray(a, jnp.float32) for a in _case(43, [20, 3, 20]))
    dy = tuple(dy_PMF)
    dot, pullback = jax.jit(grouped.dot), jax.jit(grouped.pullback)
    clean_y = dot(x_MK, w_EPKF, counts_E)
    clean_dx, clean_dw = pullback(x_MK, w_EPKF, counts_E, dy)
    bad = x_MK.at[21].set(jnp.nan)
    bad_dy = tuple(d.at[21].set(jnp.nan) for d in dy)
    y = dot(bad, w_EPKF, counts_E)
    dx, dw = pullback(bad, w_EPKF, counts_E, bad_dy)
    rest = np.arange(43) != 21
    np.testing.assert_array_equal(y[0][rest], clean_y[0][rest])
    np.testing.assert_array_equal(dx[rest], clean_dx[rest])
    np.testing.assert_array_equal(dw[jnp.array([0, 2])], clean_dw[jnp.array([0, 2])])
    assert jnp.isnan(dw[1]).any()


def test_long_groups_accumulate_in_f32():
    """2^15 ones, 64 a block: a running sum in bf16 would stop at 2^14, where half a unit is 64."""
    ones_MK = jnp.ones((1 << 15, 1), jnp.bfloat16)
    counts_E = jnp.array([1 << 15], jnp.int32)
    w_EPKF = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    _, dw_EPKF = grouped.pullback(ones_MK, w_EPKF, counts_E, (ones_MK,))
    assert dw_EPKF.dtype == jnp.bfloat16
    assert dw_EPKF.item() == 1 << 15


def test_a_tpu_gets_the_native_op_and_a_cpu_the_loop():
    x_MK, w_EPKF, dy_PMF = (jnp.asarray(a, jnp.float32) for a in _case(64, [30, 34]))
    args = (x_MK, w_EPKF, jnp.array([30, 34], jnp.int32), tuple(dy_PMF))
    lowered = {
        platform: jax.jit(grouped.pullback).trace(*args).lower(lowering_platforms=(platform,))
        for platform in ("cpu", "tpu")
    }
    text = {platform: low.as_text() for platform, low in lowered.items()}
    assert "ragged_dot" in text["tpu"] and "stablehlo.while" not in text["tpu"]
    assert "ragged_dot" not in text["cpu"] and "stablehlo.while" in text["cpu"]
