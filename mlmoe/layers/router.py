"""Routing of tokens to experts and its balance: pure functions, all in float32.

    s = sigmoid(logits / temperature),  routes = top-A of s + bias,  p = s / sum of s over routes

The bias only selects; weights come from raw scores, so it never touches the gradient. It moves once
an optimizer step, from what the batch did, and is used from the next step on. N tokens, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A bin is (max b - min b + 2) / BINS wide, about 2e-3: finer bins gained nothing in public runs.
BINS = 1024


class RouterStats(NamedTuple):
    """What one layer's router did with the real tokens of a batch; adds up over micro-batches."""

    load_E: jax.Array  # int32: tokens an expert received. Not floats: bf16 sums stop at 256
    margin_EB: jax.Array  # int32 histogram of alpha_i - s_ij over [min b - 1, max b + 1]
    dropped: jax.Array | int = 0  # int32: (token, choice) pairs that no shard had room for


def route(
    logits_NE: jax.Array, bias_E: jax.Array, live_N: jax.Array, active: int, temperature: float
) -> tuple[jax.Array, jax.Array, RouterStats]:
    """Experts [N, A] int32 (-1 at padding), weights [N, A] f32 summing to 1, and the statistics.

    Equal scores go to the lower index. `live_N` is False at padding, which is never counted.
    """
    s_NE = jax.nn.sigmoid(logits_NE.astype(jnp.float32) / temperature)
    biased_NE = jax.lax.stop_gradient(s_NE) + bias_E[None]
    top_NA, experts_NA = jax.lax.top_k(biased_NE, active + 1)
    alpha_N, experts_NA = top_NA[:, active], experts_NA[:, :active]
    p_NA = jnp.take_along_axis(s_NE, experts_NA, axis=1)
    p_NA = p_NA / jnp.maximum(jnp.sum(p_NA, axis=1, keepdims=True), 1e-20)
    experts_NA = jnp.where(live_N[:, None], experts_NA, -1)
    margin_NE = alpha_N[:, None] - jax.lax.stop_gradient(s_NE)
    return (
        experts_NA,
        p_NA,
        RouterStats(
            load_E=_count(experts_NA, bias_E.shape[0]),
            margin_EB=_histogram(margin_NE, *_bounds(bias_E), live_N),
            dropped=jnp.zeros((), jnp.int32),
        ),
    )


def quantile(bias_E: jax.Array, stats: RouterStats) -> jax.Array:
    """One exact step of score-margin balance, to within a bin (arXiv 2607.24653, eq. 13-14).

    Token i takes expert j when b_j exceeds alpha_i - s_ij, so b_j = the (q+1)-th smallest of these
    margins, q = N A / E, gives every expert its equal share. The common mean is removed. An
    empty batch (no real token) leaves the bias as it was.
    """
    E, B = stats.margin_EB.shape
    low, high = _bounds(bias_E)
    # Tokens with a margin up to the bin's end. A scan of log depth: XLA:CPU's cumsum is quadratic.
    below_EB = jax.lax.associative_scan(jnp.add, stats.margin_EB, axis=1)
    rank = jnp.sum(stats.load_E).astype(jnp.float32) / E  # q; the wanted token is number q + 1
    bin_E = jnp.sum(below_EB <= rank, axis=1)
    before_E = jnp.where(
        bin_E > 0, jnp.take_along_axis(below_EB, jnp.maximum(bin_E - 1, 0)[:, None], 1)[:, 0], 0
    )
    inside_E = jnp.take_along_axis(stats.margin_EB, jnp.minimum(bin_E, B - 1)[:, None], 1)[:, 0]
    part_E = (rank - before_E + 0.5) / jnp.maximum(inside_E, 1)
    new_E = low + (bin_E + jnp.clip(part_E, 0.0, 1.0)) * (high - low) / B
    return jnp.where(jnp.sum(stats.load_E) > 0, new_E - jnp.mean(new_E), bias_E)


def quantile_sign(bias_E: jax.Array, stats: RouterStats, delta: float = 1e-3) -> jax.Array:
    """Cools experts above the 0.9 quantile of the loads by delta, warms those below the 0.1 one.

    A sign rule with a dead zone: the middle four fifths of the experts are left alone.
    """
    load_E = stats.load_E.astype(jnp.float32)
    low, high = jnp.quantile(load_E, 0.1), jnp.quantile(load_E, 0.9)
    return bias_E + delta * ((load_E < low).astype(jnp.float32) - (load_E > high))


def keep(bias_E: jax.Array, stats: RouterStats) -> jax.Array:
    """No balance: the bias stays."""
    del stats
    return bias_E


BALANCE = {"quantile": quantile, "quantile_sign": quantile_sign, "none": keep}


def max_violation(load_E: jax.Array) -> jax.Array:
    """MaxVio = max load / mean load - 1; 0 is perfect balance, E / A - 1 the worst."""
    mean = jnp.maximum(jnp.mean(load_E.astype(jnp.float32), axis=-1), 1e-20)
    return jnp.max(load_E, axis=-1) / mean - 1.0


def _bounds(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every margin alpha - s lies here: alpha is some b_k + s_k and both scores are in (0, 1)."""
    return jnp.min(bias_E) - 1.0, jnp.max(bias_E) + 1.0


def _count(experts_NA: jax.Array, E: int) -> jax.Array:
    return jnp.sum(experts_NA[..., None] == jnp.arange(E)[None, None], axis=(0, 1), dtype=jnp.int32)


def _histogram(
    margin_NE: jax.Array, low: jax.Array, high: jax.Array, live_N: jax.Array
) -> jax.Array:
    N, E = margin_NE.shape
    bin_NE = jnp.clip(((margin_NE - low) * (BINS / (high - low))).astype(jnp.int32), 0, BINS - 1)
    live_NE = jnp.broadcast_to(live_N[:, None], (N, E)).astype(jnp.int32)
    flat_NE = bin_NE + BINS * jnp.arange(E)[None]
    return jnp.zeros(E * BINS, jnp.int32).at[flat_NE].add(live_NE).reshape(E, BINS)
