"""Experts split over the expert axis of the mesh: tokens go to them and come back, at width R only.

    y_n = sum over shards s of  sum_{a : e_na on s} p_na expert_{e_na}(z_n)

Two transports with the same result, both for use inside `sharding.per_shard`:

    gather   every shard gets all rows, runs its own experts on them, and the sums are scattered
             back. Runs anywhere, drops nothing; moves S - 1 rows a token each way.
    ragged   a row goes only to the shards that hold one of its experts (see exchange.py). For TPU:
             XLA:CPU does not have `ragged_all_to_all`.

Letters here: N tokens a shard, S shards, E/S experts a shard, K rows of a buffer,
M (token, choice) pairs.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mlmoe.layers.exchange import choices_out, make_plan, rows_back, rows_out
from pallas_kernels.expert_dispatch import expert_ffn

TRANSPORTS = ("gather", "ragged")


def expert_parallel_ffn(
    z_NR: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
    *,
    activation: str,
    axis: str,
    transport: str,
    buffer: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """`expert_ffn` over all shards of `axis`, of which each holds E/S experts; inside shard_map.

    Gradients flow to z, weights, w_in and w_out.

    Args:
      z_NR: this shard's rows, f32 or bf16.
      experts_NA: int32, global ids; outside 0 .. E-1 (by convention -1) means no expert.
      weights_NA: float, the weight of each choice.
      w_in_EPRF, w_out_EFR: this shard's slice: experts E/S * index .. E/S * (index + 1) - 1.
      axis: the mesh axis that the experts are split over.
      transport: `gather` or `ragged`.
      buffer: `ragged`: (token, choice) pairs that a shard can take, as a multiple of the N A that
        perfect balance gives it, at least 1. Pairs beyond are dropped whole rows at a time, add
        exactly 0 and get gradient 0. 0 stands for as many as there can be: none is dropped.

    Returns:
      y_NR in the dtype of z, and the number of dropped pairs of this shard's tokens, int32.

    Raises:
      ValueError: another transport, a buffer below 1, and what `expert_ffn` refuses.
    """
    args = (z_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR)
    if buffer != 0 and not (1 <= buffer < math.inf):
        raise ValueError(f"buffer is {buffer}; it must be 0 (nothing is dropped) or at least 1")
    match transport:
        case "gather":
            return _gather(*args, activation, axis), jnp.zeros((), jnp.int32)
        case "ragged":
            return _ragged(*args, activation, axis, buffer)
    raise ValueError(f"transport is {transport!r}; the choices are {', '.join(TRANSPORTS)}")


def _gather(z_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation, axis):  # type: ignore[no-untyped-def]
    E = w_in_EPRF.shape[0]
    everyones = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
    local_NA = everyones(experts_NA) - E * jax.lax.axis_index(axis)
    local_NA = jnp.where((local_NA >= 0) & (local_NA < E), local_NA, -1)
    rows = (everyones(z_NR), local_NA, everyones(weights_NA))
    y_NR = expert_ffn(*rows, w_in_EPRF, w_out_EFR, activation=activation)
    # f32: most of the S terms are 0, but bf16 would round after each.
    y_NR = jax.lax.psum_scatter(y_NR.astype(jnp.float32), axis, tiled=True)
    return y_NR.astype(z_NR.dtype)


def _ragged(z_NR, experts_NA, weights_NA, w_in_EPRF, w_out_EFR, activation, axis, buffer):  # type: ignore[no-untyped-def]
    (N, A), E, S = experts_NA.shape, w_in_EPRF.shape[0], jax.lax.axis_size(axis)
    K, M = S * N, S * N * A
    limit = None
    if buffer and math.ceil(buffer * N * A) < M:
        limit = M = math.ceil(buffer * N * A)
        K = min(K, M)
    plan = make_plan(experts_NA, E * S, axis, limit)
    x_KR = rows_out(z_NR, plan, axis, K)
    weights_NA = weights_NA.astype(jnp.float32)
    weights_KA, local_KA = choices_out(weights_NA, experts_NA % E, plan, axis, K)
    # Whatever the exchange left in rows that nobody sent is not read.
    came_K1 = jnp.arange(K)[:, None] < jnp.sum(plan.out.recv_sizes)
    local_KA = jnp.where(came_K1, local_KA, -1)
    run = partial(expert_ffn, activation=activation)
    if M < K * A:
        y_KR = _packed(run, x_KR, local_KA, weights_KA, w_in_EPRF, w_out_EFR, M)
    else:
        y_KR = run(x_KR, local_KA, weights_KA, w_in_EPRF, w_out_EFR)
    y_NR = rows_back(y_KR, plan, axis, K)
    dropped = jnp.sum((plan.sends.shard_NA < S) & ~plan.kept_NA, dtype=jnp.int32)
    return y_NR, dropped


class _Pairs(NamedTuple):
    """M pairs, row after row, so that those of a row are neighbours; a row has at most A."""

    row_M: jax.Array
    real_M: jax.Array  # False after the last
    start_K: jax.Array  # the first pair of each row
    real_K: jax.Array  # rows that have one


def _packed(run, x_KR, local_KA, weights_KA, w_in_EPRF, w_out_EFR, M):  # type: ignore[no-untyped-def]
    """The same from the at most M pairs that have an expert, each as a row of its own.

    Most rows hold one choice of A = 16 (64 shards): arrays of K A rows would be 14 times larger
    than of M.
    """
    A = local_KA.shape[1]
    real_KA = local_KA >= 0
    place_M = jnp.argsort(~real_KA.reshape(-1), stable=True)[:M].astype(jnp.int32)
    row_M, real_M = place_M // A, real_KA.reshape(-1)[place_M]
    counts_K = jnp.sum(real_KA, axis=1, dtype=jnp.int32)
    # The running sum has log depth: XLA:CPU's cumsum is quadratic.
    start_K = jax.lax.associative_scan(jnp.add, counts_K) - counts_K
    pairs = _Pairs(row_M, real_M, start_K, counts_K > 0)
    hit_MA = real_M[:, None] & ((place_M % A)[:, None] == jnp.arange(A)[None])
    local_M = jnp.sum(jnp.where(hit_MA, 1 + local_KA[row_M], 0), axis=1) - 1
    weights_M = jnp.sum(jnp.where(hit_MA, _unfold(weights_KA, pairs, A), 0), axis=1)
    x_MR = _unfold(x_KR, pairs, A)
    y_MR = run(x_MR, local_M[:, None], weights_M[:, None], w_in_EPRF, w_out_EFR)
    return _fold(y_MR, pairs, A)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _unfold(rows_KR: jax.Array, pairs: _Pairs, A: int) -> jax.Array:
    """[M, R]: the row of each pair. The transpose of `_fold`."""
    del A
    return jnp.where(pairs.real_M[:, None], rows_KR[pairs.row_M], 0)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _fold(pairs_MR: jax.Array, pairs: _Pairs, A: int) -> jax.Array:
    """[K, R]: the sum over each row's pairs, in float32; 0 for a row without any.

    Neighbours are added up in log2 A passes over all pairs, each twice as far: a scatter-add goes
    one row at a time, and a gather of A rows each moves 14 times more.
    """
    sum_MR, step = pairs_MR.astype(jnp.float32), 1
    row_M = jnp.where(pairs.real_M, pairs.row_M, -1)
    while step < min(A, row_M.size):
        same_M = jnp.pad(row_M[step:] == row_M[:-step], (0, step))
        next_MR = jnp.pad(sum_MR[step:], ((0, step), (0, 0)))
        sum_MR += jnp.where(same_M[:, None], next_MR, 0)
        step *= 2
    rows_KR = sum_MR[jnp.minimum(pairs.start_K, row_M.size - 1)]
    return jnp.where(pairs.real_K[:, None], rows_KR, 0).astype(pairs_MR.dtype)


_unfold.defvjp(
    lambda rows_KR, pairs, A: (_unfold(rows_KR, pairs, A), pairs),
    lambda A, pairs, d_MR: (_fold(d_MR, pairs, A), None),
)
_fold.defvjp(
    lambda pairs_MR, pairs, A: (_fold(pairs_MR, pairs, A), pairs),
    lambda A, pairs, d_KR: (_unfold(d_KR, pairs, A), None),
)
