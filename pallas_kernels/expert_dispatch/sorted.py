"""The op in plain jnp: sort the (token, choice) pairs by expert, then one grouped product a matrix.

Of the M = N A pairs, i is choice i % A of token i // A. In expert order row m holds pair_m, and
`place` is the inverse permutation. Only gathers move rows, in the backward pass too: the transpose
of a gather by a permutation is the gather by its inverse (a scatter-add goes one row at a time).

Backward, with dy~ the rows of dy and p~ the weights in expert order, and h = glu(z), z = x~ w_in:

    dh0 = dy~ w_out^T,   dp~ = sum_f h dh0,   dw_out = (p~ h)^T dy~,   dh = p~ dh0

dp needs no expert output, so of all [M, .] arrays only z is kept.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_dispatch import grouped
from pallas_kernels.expert_dispatch.activations import glu


class Order(NamedTuple):
    pair_M: jax.Array  # the pair in row m
    place_NA: jax.Array  # the row of each pair
    counts_E: jax.Array  # rows of each expert; then come the pairs that have none
    real_NA: jax.Array  # whether the pair has an expert


def expert_order(experts_NA: jax.Array, experts: int) -> Order:
    real_NA = (experts_NA >= 0) & (experts_NA < experts)
    expert_M = jnp.where(real_NA, experts_NA, experts).reshape(-1)
    pair_M = jnp.argsort(expert_M, stable=True).astype(jnp.int32)
    rows_M = jnp.arange(pair_M.size, dtype=jnp.int32)
    place_M = jnp.zeros_like(pair_M).at[pair_M].set(rows_M, unique_indices=True)
    counts_E = jnp.sum(expert_M[:, None] == jnp.arange(experts)[None, :], axis=0, dtype=jnp.int32)
    return Order(pair_M, place_M.reshape(experts_NA.shape), counts_E, real_NA)


def _to_experts(rows_NR: jax.Array, order: Order) -> jax.Array:
    """Each row's token, in expert order. Pairs without expert read 0: their token may hold NaN."""
    choices = order.real_NA.shape[1]
    owned_M1 = jnp.arange(order.pair_M.size)[:, None] < order.counts_E.sum()
    return jnp.where(owned_M1, rows_NR[order.pair_M // choices], 0)


def _weights(weights_NA: jax.Array, order: Order) -> jax.Array:
    return jnp.where(order.real_NA, weights_NA.astype(jnp.float32), 0)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def expert_ffn(
    x_NR: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
    activation: str,
    products: Any = grouped,
) -> jax.Array:
    """As `op.expert_ffn`, whose arguments these are, already checked. First derivatives only.

    products: what has `dot` and `pullback` as `grouped` has them (for comparing libraries).
    """
    return _forward(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation, products)[0]


def _forward(x_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation, products):
    order = expert_order(experts_NA, w_in_EPRF.shape[0])
    z = products.dot(_to_experts(x_NR, order), w_in_EPRF, order.counts_E)
    (out_MR,) = products.dot(glu(z, activation), w_out_EFR[:, None], order.counts_E)
    out_NAR = out_MR[order.place_NA].astype(jnp.float32)
    y_NR = jnp.einsum("NAR,NA->NR", out_NAR, _weights(weights_NA, order)).astype(x_NR.dtype)
    return y_NR, (x_NR, weights_NA, w_in_EPRF, w_out_EFR, order, z)


def _backward(activation, products, saved, dy_NR):
    x_NR, weights_NA, w_in_EPRF, w_out_EFR, order, z = saved
    h_MF, pull_glu = jax.vjp(lambda z: glu(z, activation), z)
    p_M1 = _weights(weights_NA, order).reshape(-1)[order.pair_M][:, None]

    dh0_MF, dw_out_E1FR = products.pullback(
        (p_M1 * h_MF).astype(h_MF.dtype),
        w_out_EFR[:, None],
        order.counts_E,
        (_to_experts(dy_NR, order),),
    )
    dp_M = jnp.einsum("MF,MF->M", h_MF, dh0_MF, preferred_element_type=jnp.float32)
    (dz,) = pull_glu((p_M1 * dh0_MF).astype(h_MF.dtype))
    dx_MR, dw_in_EPRF = products.pullback(_to_experts(x_NR, order), w_in_EPRF, order.counts_E, dz)

    dx_NR = dx_MR[order.place_NA].astype(jnp.float32).sum(axis=1).astype(x_NR.dtype)
    dweights_NA = dp_M[order.place_NA].astype(weights_NA.dtype)
    return dx_NR, None, dweights_NA, dw_in_EPRF, dw_out_E1FR[:, 0]


expert_ffn.defvjp(_forward, _backward)
