"""Rows of tokens sent to the shards of an axis and back, each row once a shard: the plan and moves.

Letters here: N tokens and A choices of one shard, S shards, K rows of a buffer.
A token goes once to each shard that holds any of its experts, together with the ids and weights of
those; one row comes back and is added up at home in float32. Rows lie shard after shard, in the
order of the tokens. All offsets follow from how many rows each shard has for each other, which is
exchanged first.

`rows_out` and `rows_back` are linear and each is the transpose of the other, so the gradient of one
is the other, by the same plan; the primitive is never differentiated.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The one collective that XLA:CPU does not have; tests put an emulation in its place.
ragged_all_to_all = jax.lax.ragged_all_to_all


class Sends(NamedTuple):
    """The rows that one shard has for all shards; no collective is needed to know them."""

    token_K: jax.Array  # the token of each row
    shard_K: jax.Array  # where it goes; S beyond the last row
    pairs_K: jax.Array  # how many of its token's choices are there; 0 beyond the last row
    shard_NA: jax.Array  # where each choice's expert is; S for none
    row_NA: jax.Array  # the row that carries each choice
    column_NA: jax.Array  # and which of that row's choices it is; 0 stands for the row


class Slices(NamedTuple):
    """What `jax.lax.ragged_all_to_all` takes besides the data, [S] int32 each."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


class Plan(NamedTuple):
    """One exchange: the way out, the way back, and the gradients of both."""

    sends: Sends
    kept_K: jax.Array  # rows that exist and fit into their receiver's buffer
    kept_NA: jax.Array  # choices that such a row carries
    out: Slices
    back: Slices


def list_sends(experts_NA: jax.Array, experts: int, shards: int) -> Sends:
    """Rows for S shards of E/S experts each, from global ids; ids outside 0 .. E-1 are none."""
    N, A = experts_NA.shape
    real_NA = (experts_NA >= 0) & (experts_NA < experts)
    shard_NA = jnp.where(real_NA, experts_NA // (experts // shards), shards)
    same_NAA = shard_NA[:, :, None] == shard_NA[:, None, :]
    earlier_AA = jnp.arange(A)[:, None] > jnp.arange(A)[None, :]
    column_NA = jnp.sum(same_NAA & earlier_AA[None], axis=2, dtype=jnp.int32)
    first_NA = real_NA & (column_NA == 0)
    key_M = jnp.where(first_NA, shard_NA, shards).reshape(-1)
    pair_M = jnp.argsort(key_M, stable=True).astype(jnp.int32)
    rows_M = jnp.arange(N * A, dtype=jnp.int32)
    place_NA = jnp.zeros_like(pair_M).at[pair_M].set(rows_M, unique_indices=True).reshape(N, A)
    leads_NAA = same_NAA & first_NA[:, None, :]
    row_NA = jnp.sum(jnp.where(leads_NAA, place_NA[:, None, :], 0), axis=2)
    pair_K = pair_M[: N * min(A, shards)]  # there are never more rows
    token_K, shard_K = pair_K // A, key_M[pair_K]
    here_KA = (shard_NA[token_K] == shard_K[:, None]) & (shard_K < shards)[:, None]
    pairs_K = jnp.sum(here_KA, axis=1, dtype=jnp.int32)
    return Sends(token_K, shard_K, pairs_K, shard_NA, row_NA, column_NA)


def fitting(sends: Sends, pairs_SS: jax.Array, me: jax.Array, limit: int) -> jax.Array:
    """[K] bool: the rows with which their receiver has at most `limit` (token, choice) pairs.

    A receiver takes the rows of shard 0 first, then those of shard 1 and so on, and nothing after
    the first that does not fit: a prefix of what each shard has for it. pairs_SS[i, j] is what
    shard i has for shard j, dropped or not; `me` is this shard.
    """
    S = pairs_SS.shape[0]
    upto_K = jax.lax.associative_scan(jnp.add, sends.pairs_K)  # XLA:CPU's cumsum is quadratic
    before_S = jnp.sum(jnp.where(jnp.arange(S)[:, None] < me, pairs_SS, 0), axis=0)
    room_S = limit - before_S + _starts(pairs_SS)[me]
    return (sends.pairs_K > 0) & (upto_K <= room_S[jnp.minimum(sends.shard_K, S - 1)])


def slices(rows_SS: jax.Array, kept_SS: jax.Array, me: jax.Array) -> tuple[Slices, Slices]:
    """The ways out and back of shard `me`, from the rows that shard i has, and sends, to shard j.

    A sender's buffer holds all its rows, dropped ones too; a receiver's only those that came.
    """
    at_home_SS = _starts(rows_SS)  # [i, j]: where in i's buffer the rows for j begin
    away_SS = _starts(kept_SS.T).T  # [i, j]: where in j's buffer the rows of i begin
    sent_S, came_S = kept_SS[me], kept_SS[:, me]
    out = Slices(at_home_SS[me], sent_S, away_SS[me], came_S)
    back = Slices(away_SS[:, me], came_S, at_home_SS[:, me], sent_S)
    return out, back


def make_plan(experts_NA: jax.Array, experts: int, axis: str, limit: int | None) -> Plan:
    """The exchange of all shards along `axis`; inside shard_map.

    Args:
      experts_NA: int32 global ids of this shard's tokens; outside 0 .. experts - 1 means none.
      experts: E, over all shards.
      limit: (token, choice) pairs that a shard takes, None for as many as there are.
    """
    S, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    sends = list_sends(experts_NA, experts, S)

    def everyones(weights_K: jax.Array) -> jax.Array:
        to_SK = sends.shard_K[None] == jnp.arange(S)[:, None]
        mine_S = jnp.sum(jnp.where(to_SK, weights_K[None], 0), axis=1, dtype=jnp.int32)
        return jax.lax.all_gather(mine_S, axis)

    kept_K = sends.pairs_K > 0
    rows_SS = kept_SS = everyones(kept_K)
    if limit is not None:
        kept_K = fitting(sends, everyones(sends.pairs_K), me, limit)
        kept_SS = everyones(kept_K)
    kept_NA = (sends.shard_NA < S) & kept_K[jnp.minimum(sends.row_NA, kept_K.size - 1)]
    return Plan(sends, kept_K, kept_NA, *slices(rows_SS, kept_SS, me))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rows_out(rows_NR: jax.Array, plan: Plan, axis: str, K: int) -> jax.Array:
    """[K, R]: a copy of each token's row on every shard that holds one of its experts; then 0."""
    rows_KR = jnp.where(plan.kept_K[:, None], rows_NR[plan.sends.token_K], 0)
    return _move(rows_KR, plan.out, axis, K)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rows_back(rows_KR: jax.Array, plan: Plan, axis: str, K: int) -> jax.Array:
    """[N, R]: the sum over a token's rows on all shards, in float32; 0 where none was kept."""
    del K  # the size of what rows_out made, for the gradient
    home_KR = _move(rows_KR, plan.back, axis, plan.kept_K.size)
    carries_NA = plan.kept_NA & (plan.sends.column_NA == 0)
    rows_NAR = jnp.where(carries_NA[..., None], home_KR[plan.sends.row_NA], 0)
    return jnp.sum(rows_NAR.astype(jnp.float32), axis=1).astype(rows_KR.dtype)


rows_out.defvjp(
    lambda rows_NR, plan, axis, K: (rows_out(rows_NR, plan, axis, K), plan),
    lambda axis, K, plan, d_KR: (rows_back(d_KR, plan, axis, K), None),
)
rows_back.defvjp(
    lambda rows_KR, plan, axis, K: (rows_back(rows_KR, plan, axis, K), plan),
    lambda axis, K, plan, d_NR: (rows_out(d_NR, plan, axis, K), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def choices_out(
    weights_NA: jax.Array, local_NA: jax.Array, plan: Plan, axis: str, K: int
) -> tuple[jax.Array, jax.Array]:
    """What goes with `rows_out`: weights [K, A] f32 and the receiver's own ids [K, A], -1 for none.

    A row's choices come first, in their order, whatever others its token has.

    Both in one array of 32-bit words: two narrow ones would take twice the time of one, since the
    least that a TPU moves of a row is 128 words. `local_NA` counts from the shard's first expert.
    """
    s, A = plan.sends, weights_NA.shape[1]
    here_KA = (s.shard_NA[s.token_K] == s.shard_K[:, None]) & plan.kept_K[:, None]
    hit_KAA = here_KA[..., None] & _is_column(s.column_NA[s.token_K])
    weights_KA = jnp.sum(jnp.where(hit_KAA, weights_NA[s.token_K][..., None], 0), axis=1)
    # One more than the id, so that a row that nobody sent says none.
    id_KA = jnp.sum(jnp.where(hit_KAA, 1 + local_NA[s.token_K][..., None], 0), axis=1)
    words_KA = jnp.concatenate([jax.lax.bitcast_convert_type(weights_KA, jnp.int32), id_KA], axis=1)
    words_KA = _move(words_KA, plan.out, axis, K)
    return jax.lax.bitcast_convert_type(words_KA[:, :A], jnp.float32), words_KA[:, A:] - 1


def _choices_pullback(axis, K, plan, cotangents):  # type: ignore[no-untyped-def]
    home_KA = _move(cotangents[0], plan.back, axis, plan.kept_K.size)
    hit_NAA = plan.kept_NA[..., None] & _is_column(plan.sends.column_NA)
    return jnp.sum(jnp.where(hit_NAA, home_KA[plan.sends.row_NA], 0), axis=2), None, None


choices_out.defvjp(
    lambda weights_NA, local_NA, plan, axis, K: (
        choices_out(weights_NA, local_NA, plan, axis, K),
        plan,
    ),
    _choices_pullback,
)


def _move(rows_KR: jax.Array, by: Slices, axis: str, K: int) -> jax.Array:
    """[K, R] with what the other shards sent here; rows that nobody sent are 0."""
    empty_KR = jnp.zeros((K, rows_KR.shape[1]), rows_KR.dtype)
    return ragged_all_to_all(rows_KR, empty_KR, *by, axis_name=axis)


def _starts(sizes_SS: jax.Array) -> jax.Array:
    """Running sums along the last axis, each without its own entry."""
    return jnp.cumsum(sizes_SS, axis=-1) - sizes_SS


def _is_column(column_NA: jax.Array) -> jax.Array:
    """[N, A, A] one-hot: a product with it moves narrow rows without a gather for each number."""
    return column_NA[..., None] == jnp.arange(column_NA.shape[1])[None, None]
