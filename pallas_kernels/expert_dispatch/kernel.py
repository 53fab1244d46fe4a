"""The Pallas TPU kernels: products over rows that lie in expert order, the activation fused in.

Rows come in tiles of `tm`, each of one expert (see rows.py), so that a grid step is plain products
with one expert's matrices. Visit v, the last grid axis, works on tile `tile_V[v]` with the matrices
of expert `expert_V[v]`; how many visits there are is known only when the program runs. The first
axis runs over columns and is split over a chip's cores. Consecutive visits of one expert find its
matrices already in VMEM. Rows of a tile that are nobody's may hold anything, NaN too, and give
anything; only `outer`, which adds rows up, must leave them out.

    glu       h_m = glu(x_m w_e)                    and, where it is kept for the gradient, x_m w_e
    product   y_m = sum_p x^p_m w_ep                or with each matrix transposed
    glu_grad  dh0_m = dy_m w_out_e^T,  p_m h_m,  dz_m = p_m dh0_m glu'(z_m),  dp_m = h_m . dh0_m
    outer     dw_ep = sum over the rows m of e of x_m^T dz^p_m
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.expert_dispatch.activations import glu as glu_of

VMEM = 60 << 20  # bytes, of a core's 64 MiB on v5p (v6e: 128); the default is 16


class Visits(NamedTuple):
    """What each visit works on; one list for all kernels of a pass."""

    expert_V: jax.Array
    tile_V: jax.Array
    rows_V: jax.Array  # how many rows of the tile are the expert's; the others may hold anything
    number: jax.Array | int  # of the V that there are


def _dot(x, w, contract=(1, 0)):
    """f32 product of two matrices over axis `contract[0]` of x and `contract[1]` of w."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        x, w, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _call(body, name, visits: Visits, grid, in_specs, outs, interpret, scratch=()):
    """The kernel over `grid` and then the visits. outs: pairs (BlockSpec, ShapeDtypeStruct)."""
    semantics: Any = ("parallel",) + ("arbitrary",) * len(grid)
    run = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(*grid, visits.number),
            in_specs=in_specs,
            out_specs=[spec for spec, _ in outs],
            scratch_shapes=scratch,
        ),
        out_shape=[shape for _, shape in outs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=name,
    )
    return functools.partial(run, *visits[:3])


def _glu(_expert_V, _tile_V, _rows_V, x, w, h, *z, activation):
    parts = [_dot(x[...], w[0, p]) for p in range(w.shape[1])]
    h[...] = glu_of(parts, activation).astype(h.dtype)
    for kept in z:
        for p, part in enumerate(parts):
            kept[p] = part.astype(kept.dtype)


def glu(x_MR, w_EPRF, visits, activation, *, tm, tf, keep, interpret):
    """(h [M, F],) or, if `keep`, (h, z [P, M, F]), all in x's dtype. F a multiple of tf."""
    (M, R), (_, P, _, F) = x_MR.shape, w_EPRF.shape
    shape = jax.ShapeDtypeStruct
    outs = [(pl.BlockSpec((tm, tf), lambda f, v, e, t, _: (t[v], f)), shape((M, F), x_MR.dtype))]
    if keep:
        spec = pl.BlockSpec((P, tm, tf), lambda f, v, e, t, _: (0, t[v], f))
        outs.append((spec, shape((P, M, F), x_MR.dtype)))
    in_specs = [
        pl.BlockSpec((tm, R), lambda f, v, e, t, _: (t[v], 0)),
        pl.BlockSpec((1, P, R, tf), lambda f, v, e, t, _: (e[v], 0, 0, f)),
    ]
    body = functools.partial(_glu, activation=activation)
    call = _call(body, "expert_glu", visits, (F // tf,), in_specs, outs, interpret)
    return tuple(call(x_MR, w_EPRF))


def _product(_expert_V, _tile_V, _rows_V, x, w, y, *, contract):
    total = _dot(x[0], w[0, 0], contract)
    for p in range(1, w.shape[1]):
        total += _dot(x[p], w[0, p], contract)
    y[...] = total.astype(y.dtype)


def product(x_PMK, w, visits, *, tm, tn, transposed, interpret):
    """y [M, n] in x's dtype; w is [E, P, K, n], or [E, P, n, K] if `transposed`."""
    P, M, K = x_PMK.shape
    n = w.shape[2 if transposed else 3]
    if transposed:
        matrix = pl.BlockSpec((1, P, tn, K), lambda n, v, e, t, _: (e[v], 0, n, 0))
    else:
        matrix = pl.BlockSpec((1, P, K, tn), lambda n, v, e, t, _: (e[v], 0, 0, n))
    in_specs = [pl.BlockSpec((P, tm, K), lambda n, v, e, t, _: (0, t[v], 0)), matrix]
    out = pl.BlockSpec((tm, tn), lambda n, v, e, t, _: (t[v], n))
    body = functools.partial(_product, contract=(1, 1 if transposed else 0))
    outs = [(out, jax.ShapeDtypeStruct((M, n), x_PMK.dtype))]
    call = _call(body, "expert_product", visits, (n // tn,), in_specs, outs, interpret)
    return call(x_PMK, w)[0]


def _glu_grad(_expert_V, _tile_V, _rows_V, dy, w_out, z, p, ph, dz, dp, *, activation):
    dh0 = _dot(dy[...], w_out[0], (1, 1))
    parts = [z[i].astype(jnp.float32) for i in range(z.shape[0])]
    h, pull = jax.vjp(lambda parts: glu_of(parts, activation), parts)
    p_M1 = p[...]
    ph[...] = (p_M1 * h).astype(ph.dtype)
    for i, d in enumerate(pull(p_M1 * dh0)[0]):
        dz[i] = d.astype(dz.dtype)
    # Sums across lanes are left to XLA: here only whole registers are added.
    dp_MF, lanes = h * dh0, dp.shape[2]
    total = dp_MF[:, :lanes]
    for i in range(lanes, dp_MF.shape[1], lanes):
        total += dp_MF[:, i : i + lanes]
    dp[0] = total


def glu_grad(dy_MR, w_out_EFR, z_PMF, p_M1, visits, activation, *, tm, tf, interpret):
    """(p h [M, F], dz [P, M, F], dp [n, M, 128] f32 still to be summed over its outer axes)."""
    (M, R), (P, _, F) = dy_MR.shape, z_PMF.shape
    shape, lanes = jax.ShapeDtypeStruct, min(tf, 128)
    z_spec = pl.BlockSpec((P, tm, tf), lambda f, v, e, t, _: (0, t[v], f))
    in_specs = [
        pl.BlockSpec((tm, R), lambda f, v, e, t, _: (t[v], 0)),
        pl.BlockSpec((1, tf, R), lambda f, v, e, t, _: (e[v], f, 0)),
        z_spec,
        pl.BlockSpec((tm, 1), lambda f, v, e, t, _: (t[v], 0)),
    ]
    outs = [
        (pl.BlockSpec((tm, tf), lambda f, v, e, t, _: (t[v], f)), shape((M, F), z_PMF.dtype)),
        (z_spec, shape((P, M, F), z_PMF.dtype)),
        (
            pl.BlockSpec((1, tm, lanes), lambda f, v, e, t, _: (f, t[v], 0)),
            shape((F // tf, M, lanes), jnp.float32),
        ),
    ]
    body = functools.partial(_glu_grad, activation=activation)
    call = _call(body, "expert_glu_grad", visits, (F // tf,), in_specs, outs, interpret)
    return tuple(call(dy_MR, w_out_EFR, z_PMF, p_M1))


def _outer(expert_V, _tile_V, rows_V, x, dz, dw, sum_PKF):
    v = pl.program_id(2)
    first = (v == 0) | (expert_V[v] != expert_V[jnp.maximum(v - 1, 0)])

    def owned(block):  # rows that are not the expert's may hold NaN, in both factors
        row = jax.lax.broadcasted_iota(jnp.int32, (block.shape[0], 1), 0)
        return jnp.where(row < rows_V[v], block, 0)

    x_MK = owned(x[...])
    for p in range(dz.shape[0]):
        # A branch for the first tile of an expert would cost more bundles than it saves.
        total = jnp.where(first, 0.0, sum_PKF[p]) + _dot(x_MK, owned(dz[p]), (0, 0))
        sum_PKF[p] = total
        dw[0, p] = total.astype(dw.dtype)


def outer(x_MK, dz_PMF, visits, experts, *, tm, tk, tf, interpret):
    """dw [E, P, K, F] in x's dtype, summed in f32; 0 for an expert whose one visit has no rows."""
    (_, K), (P, _, F) = x_MK.shape, dz_PMF.shape
    in_specs = [
        pl.BlockSpec((tm, tk), lambda f, k, v, e, t, _: (t[v], k)),
        pl.BlockSpec((P, tm, tf), lambda f, k, v, e, t, _: (0, t[v], f)),
    ]
    out = pl.BlockSpec((1, P, tk, tf), lambda f, k, v, e, t, _: (e[v], 0, k, f))
    outs = [(out, jax.ShapeDtypeStruct((experts, P, K, F), x_MK.dtype))]
    scratch = [pltpu.VMEM((P, tk, tf), jnp.float32)]
    grid = (F // tf, K // tk)
    call = _call(_outer, "expert_outer", visits, grid, in_specs, outs, interpret, scratch)
    return call(x_MK, dz_PMF)[0]
