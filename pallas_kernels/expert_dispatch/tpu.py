"""The op on the TPU kernels: gathers into expert order, block sizes, the combination, the gradient.

Forward, over rows in expert order (rows.py): x~ by gather, h = glu(x~ w_in) in one kernel, so that
no projection goes to HBM, out = h w_out, and y from a gather of out with f32 weights. Backward, in
the letters of sorted.py: one kernel for dh0 = dy~ w_out^T and all that follows from it without
another product (p~ h, dz, dp~), then dw_out, dw_in and dx~.

Kept for the gradient is z in the dtype of x, 2 P F bytes a row in bf16 (18 KiB at P = 3, F = 3072);
without it x~ w_in would be computed again, a quarter more matrix work in the whole of a step. x~
(2 R bytes a row) is gathered again, and p~ h is written by the backward kernel. The gathers and
their memory are those of N A rows, also where few pairs have an expert; the kernels' work is not.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_dispatch import blocks, kernel
from pallas_kernels.expert_dispatch.rows import Rows, rows_in_tiles


class _Plan(NamedTuple):
    """What is fixed at compile time."""

    activation: str
    tm: int
    interpret: Any


def expert_ffn(
    x_NR: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
    activation: str,
    *,
    interpret: Any,
) -> jax.Array:
    """As `op.expert_ffn`, whose arguments these are, already checked. First derivatives only.

    Raises:
      ValueError: widths of which not even the narrowest blocks fit a core's memory.
    """
    (N, R), A, E, F = x_NR.shape, experts_NA.shape[1], w_in_EPRF.shape[0], w_in_EPRF.shape[3]
    dr, df = -R % blocks.LANES, -F % blocks.LANES
    plan = _Plan(activation, blocks.tile_rows(N * A, E, x_NR.dtype), interpret)
    y_NR = _expert_ffn(
        jnp.pad(x_NR, ((0, 0), (0, dr))),
        experts_NA,
        weights_NA,
        jnp.pad(w_in_EPRF, ((0, 0), (0, 0), (0, dr), (0, df))),
        jnp.pad(w_out_EFR, ((0, 0), (0, df), (0, dr))),
        plan,
    )
    return y_NR[:, :R]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _expert_ffn(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, plan: _Plan):
    return _forward(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, plan, keep=False)[0]


def _forward(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, plan, *, keep=True):
    (E, P, R, F), tm, size = w_in_EPRF.shape, plan.tm, x_NR.dtype.itemsize
    rows = rows_in_tiles(experts_NA, E, tm)
    fixed = {"tm": tm, "interpret": plan.interpret}

    outs = (1 + P if keep else 1) * tm
    tf = blocks.columns(F, size, fixed=tm * R, per_column=P * R + outs, sums=P * tm)
    h_MF, *z = kernel.glu(
        _to_experts(x_NR, rows), w_in_EPRF, rows.visits, plan.activation, tf=tf, keep=keep, **fixed
    )
    tn = blocks.columns(R, size, fixed=tm * F, per_column=F + tm, sums=tm)
    w_out_E1FR = w_out_EFR[:, None]
    out_MR = kernel.product(h_MF[None], w_out_E1FR, rows.visits, tn=tn, transposed=False, **fixed)
    y_NR = jnp.einsum("NAR,NA->NR", _to_tokens(out_MR, rows), _weights(weights_NA, rows))
    return y_NR.astype(x_NR.dtype), (x_NR, weights_NA, w_in_EPRF, w_out_EFR, rows, *z)


def _backward(plan, saved, dy_NR):
    x_NR, weights_NA, w_in_EPRF, w_out_EFR, rows, z_PMF = saved
    (E, P, R, F), tm, size = w_in_EPRF.shape, plan.tm, x_NR.dtype.itemsize
    fixed = {"tm": tm, "interpret": plan.interpret}

    dy_MR = _to_experts(dy_NR, rows)
    p_M1 = _weights(weights_NA, rows).reshape(-1)[rows.pair_M][:, None]
    tf = blocks.columns(F, size, fixed=tm * R, per_column=R + (2 * P + 1) * tm, sums=P * tm)
    ph_MF, dz_PMF, dp_nML = kernel.glu_grad(
        dy_MR, w_out_EFR, z_PMF, p_M1, rows.visits, plan.activation, tf=tf, **fixed
    )
    tk, tf = blocks.corner(F, R, 1, tm, size)
    dw_out_E1FR = kernel.outer(ph_MF, dy_MR[None], rows.visits_of_all, E, tk=tk, tf=tf, **fixed)
    tk, tf = blocks.corner(R, F, P, tm, size)
    x_MR = _to_experts(x_NR, rows)
    dw_in_EPRF = kernel.outer(x_MR, dz_PMF, rows.visits_of_all, E, tk=tk, tf=tf, **fixed)
    tn = blocks.columns(R, size, fixed=P * tm * F, per_column=P * F + tm, sums=P * tm)
    dx_MR = kernel.product(dz_PMF, w_in_EPRF, rows.visits, tn=tn, transposed=True, **fixed)

    dx_NR = _to_tokens(dx_MR, rows).sum(axis=1).astype(x_NR.dtype)
    dp_NA = jnp.where(rows.real_NA, dp_nML.sum(axis=(0, 2))[rows.place_NA], 0)
    return dx_NR, None, dp_NA.astype(weights_NA.dtype), dw_in_EPRF, dw_out_E1FR[:, 0]


_expert_ffn.defvjp(_forward, _backward)


def _to_experts(x_NR: jax.Array, rows: Rows) -> jax.Array:
    """Each row's token. Rows that nobody owns read any token, which may hold NaN."""
    return x_NR[rows.pair_M // rows.real_NA.shape[1]]


def _to_tokens(out_MR: jax.Array, rows: Rows) -> jax.Array:
    """[N, A, R] f32, 0 for pairs without expert: the row they read may never have been written."""
    out_NAR = jnp.where(rows.real_NA[..., None], out_MR[rows.place_NA], 0)
    return out_NAR.astype(jnp.float32)


def _weights(weights_NA: jax.Array, rows: Rows) -> jax.Array:
    return jnp.where(rows.real_NA, weights_NA.astype(jnp.float32), 0)
