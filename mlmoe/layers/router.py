"""Routing of tokens to experts: pure functions, all in float32.

    s = sigmoid(logits / temperature),  routes = top-A of s + bias,  p = s / sum of s over routes

The bias only selects; weights come from raw scores, so it never touches the gradient. It moves once
an optimizer step, by int32 counts of what the batch did (`balance.py`), and is used from the next
step on. N = B T tokens, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mlmoe.config import MoEConfig
from mlmoe.layers.capacity import assign

# Bins of the margins: EVEN ones of (max b - min b + 2) / EVEN, about 3e-3, laid over FINE ones that
# shrink with the distance to the bias, to 1e-6. Without the latter a router whose scores differ by
# less than 2e-3 (saturated, or with narrow logits) jumps about and ends with dead experts.
EVEN, FINE = 768, 256
BINS = EVEN + FINE
NEAR = 1e-5  # the distance to the bias at which the fine bins stop shrinking


class Routing(NamedTuple):
    """What routers have besides parameters, carried from step to step. Of one layer or of all."""

    bias: jax.Array  # f32 [E] or [L, E]
    temperature: jax.Array  # f32 [] or [L]
    capacity: jax.Array  # f32 [] or [L]: most tokens of an expert over the mean; inf: no limit

    def without_capacity(self) -> "Routing":
        """For evaluation and generation, where a token's experts may depend on no other token."""
        return self._replace(capacity=jnp.full_like(self.capacity, jnp.inf))


class RouterStats(NamedTuple):
    """What one layer's router did with the real tokens of a batch.

    Adds up over micro-batches and devices; `per_shard` puts an axis of devices in front.
    """

    load_E: jax.Array  # int32: tokens an expert received. Not floats: bf16 sums stop at 256
    margin_EB: jax.Array  # int32 histogram of alpha_i - s_ij; B = 0 where the balance needs none
    rerouted: jax.Array  # int32 []: choices that a full expert passed on to the next-best
    dropped: jax.Array  # int32 []: choices that no expert took; not in load_E
    unsent: jax.Array  # int32 []: choices that a full buffer did not send; in load_E
    logits: jax.Array  # f32 [4]: number, sum, sum of squares of logits / T, and number times T
    aux: jax.Array  # f32 []: the balancing loss of `aux_loss`, times the tokens


def route(
    config: MoEConfig, routing: Routing, logits_BTE: jax.Array, live_BT: jax.Array
) -> tuple[jax.Array, jax.Array, RouterStats]:
    """Experts [N, A] int32 (-1: none), weights [N, A] f32 summing to 1, and the statistics.

    `routing` is one layer's. `live_BT` is False at padding, which has no expert and never counts.
    """
    (B, T, E), A = logits_BTE.shape, config.active
    live_N = live_BT.reshape(-1)
    scaled_NE = (logits_BTE.astype(jnp.float32) / routing.temperature).reshape(-1, E)
    scaled_NE = jnp.where(live_N[:, None], scaled_NE, 0.0)  # padding may hold NaN
    s_NE = jax.nn.sigmoid(scaled_NE)
    fixed_NE = jax.lax.stop_gradient(s_NE)
    choice_NE = fixed_NE + routing.bias[None]
    experts_NA, alpha_N, order_NE = _best(choice_NE, live_N, T, A)
    rerouted = dropped = zero = jnp.zeros((), jnp.int32)
    if config.balance == "capacity":
        experts_NA, rerouted, dropped = assign(
            order_NE.reshape(B, T, E), live_BT, routing.capacity, A, config.reroutes
        )
        alpha_N = jnp.zeros_like(alpha_N)
    # s / sum s as the softmax of log s: a quotient of scores of 1e-20 has no finite gradient.
    log_s_NA = jnp.take_along_axis(jax.nn.log_sigmoid(scaled_NE), jnp.maximum(experts_NA, 0), 1)
    p_NA = jax.nn.softmax(jnp.where(experts_NA < 0, -1e9, log_s_NA), axis=1)
    p_NA = jnp.where(experts_NA < 0, 0.0, p_NA)
    load_E = _count(experts_NA, E)
    stats = RouterStats(
        load_E=load_E,
        margin_EB=jnp.zeros((E, 0), jnp.int32),
        rerouted=rerouted,
        dropped=dropped,
        unsent=zero,
        logits=_moments(jax.lax.stop_gradient((scaled_NE, routing.temperature)), live_N),
        aux=jnp.zeros(()),
    )
    if config.balance in ("quantile", "capacity"):
        bin_NE = place(alpha_N[:, None] - fixed_NE, routing.bias).astype(jnp.int32)
        bin_NE = jnp.where(live_N[:, None], jnp.clip(bin_NE, 0, BINS - 1), -1)
        stats = stats._replace(margin_EB=_count_bins(bin_NE))
    if config.balance == "aux_loss":
        stats = stats._replace(aux=_balancing_loss(scaled_NE, load_E, live_N, A))
    return experts_NA, p_NA, stats


def _best(
    choice_NE: jax.Array, live_N: jax.Array, T: int, A: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The A best experts of each token (-1 at padding), the best choice of the others, and choices
    of the same order in which none of a token's that could be among the A equal each other.

    Where the A-th is one of several equal ones, as of a router that is zero or saturated, which of
    them are taken turns with the token's place in its row, not always those with low numbers. That
    costs a second top_k, which is run only where there is such a token.
    """
    E = choice_NE.shape[1]
    _, experts_NA = jax.lax.top_k(choice_NE, A)
    # The best of the others. As the last of the top A + 1 it makes XLA:CPU sort whole rows.
    last_N1 = jnp.min(jnp.take_along_axis(choice_NE, experts_NA, 1), axis=1, keepdims=True)
    below_N = jnp.max(jnp.where(choice_NE < last_N1, choice_NE, -jnp.inf), axis=1)
    tied_N = jnp.sum(choice_NE >= last_N1, axis=1) > A
    alpha_N = jnp.where(tied_N, last_N1[:, 0], below_N)

    def turn(_: jax.Array) -> tuple[jax.Array, jax.Array]:
        place_N1 = (jnp.arange(choice_NE.shape[0]) % T)[:, None]
        turn_NE = ((jnp.arange(E)[None] - A * place_N1) % E).astype(jnp.float32)
        above_NE = jnp.where(choice_NE > last_N1, choice_NE + 1, last_N1 + 1 - (turn_NE + 1) / E)
        order_NE = jnp.where(tied_N[:, None] & (choice_NE >= last_N1), above_NE, choice_NE)
        return jax.lax.top_k(order_NE, A)[1], order_NE

    keep = lambda experts_NA: (experts_NA, choice_NE)  # noqa: E731
    experts_NA, order_NE = jax.lax.cond(jnp.any(tied_N & live_N), turn, keep, experts_NA)
    return jnp.where(live_N[:, None], experts_NA, -1), alpha_N, order_NE


def bounds(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every margin alpha - s lies here: alpha is 0 or some b_k + s_k, and scores are in (0, 1)."""
    return jnp.minimum(jnp.min(bias_E), 0.0) - 1.0, jnp.maximum(jnp.max(bias_E), 0.0) + 1.0


def place(margin_NE: jax.Array, bias_E: jax.Array) -> jax.Array:
    """Where margins lie on the axis of bins, 0 to BINS: u(m - b_j) - u(low - b_j), strictly rising.

    u(d) = EVEN d / R + FINE / 2 sign(d) log2(1 + |d| / NEAR) / log2(1 + R / NEAR),  R = high - low
    """
    low, high = bounds(bias_E)
    fine = FINE / 2 / _log2(1.0 + (high - low) / NEAR)

    def u(d: jax.Array) -> jax.Array:
        return EVEN / (high - low) * d + fine * jnp.sign(d) * _log2(1.0 + jnp.abs(d) / NEAR)

    return u(margin_NE - bias_E[None]) - u(low - bias_E)[None]


def _log2(x: jax.Array) -> jax.Array:
    """The logarithm of x >= 1 at powers of 2, straight lines between: the bits of a float32.

    It is taken of every margin; a real one would cost as much as the rest of the balance.
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32) * 2.0**-23 - 127.0


def at_place(place_E: jax.Array, bias_E: jax.Array) -> jax.Array:
    """The margin of each expert that lies at `place_E`: the inverse of `place`, by bisection."""
    low, high = (jnp.broadcast_to(x, bias_E.shape) for x in bounds(bias_E))

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle = 0.5 * (ends[0] + ends[1])
        right = place(middle[None], bias_E)[0] <= place_E
        return jnp.where(right, middle, ends[0]), jnp.where(right, ends[1], middle)

    low, high = jax.lax.fori_loop(0, 30, halve, (low, high))
    return 0.5 * (low + high)


def _count(experts_NA: jax.Array, E: int) -> jax.Array:
    return jnp.sum(experts_NA[..., None] == jnp.arange(E)[None, None], axis=(0, 1), dtype=jnp.int32)


def _moments(scaled: tuple[jax.Array, jax.Array], live_N: jax.Array) -> jax.Array:
    x_NE, temperature = scaled
    number = jnp.sum(live_N.astype(jnp.float32)) * x_NE.shape[1]
    return jnp.stack([number, jnp.sum(x_NE), jnp.sum(x_NE**2), number * temperature])


def _balancing_loss(
    scaled_NE: jax.Array, load_E: jax.Array, live_N: jax.Array, A: int
) -> jax.Array:
    """E / A sum_e f_e sum_i p_ie with f the share of tokens that went to e and p = s / sum_e s.

    Switch Transformer's loss (arXiv 2101.03961) times the number of tokens; the shares are those of
    one device's micro-batch, as is usual.
    """
    p_NE = jax.nn.softmax(jax.nn.log_sigmoid(scaled_NE), axis=1)
    p_NE = jnp.where(live_N[:, None], p_NE, 0.0)
    f_E = load_E / jnp.maximum(jnp.sum(live_N), 1)
    return load_E.size / A * jnp.sum(f_E[None] * p_NE)


def _count_bins(bin_NE: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(bin_NE, cpu=_scatter_count, default=_matmul_count)


def _scatter_count(bin_NE: jax.Array) -> jax.Array:
    E = bin_NE.shape[1]
    one_NE = (bin_NE >= 0).astype(jnp.int32)
    flat_NE = jnp.maximum(bin_NE, 0) + BINS * jnp.arange(E)[None]
    return jnp.zeros(E * BINS, jnp.int32).at[flat_NE].add(one_NE).reshape(E, BINS)


def _matmul_count(bin_NE: jax.Array, block: int = 512) -> jax.Array:
    """The same without a scatter, which a TPU does one element at a time.

    A bin is a high and a low digit; the counts are a product of the two one-hot matrices, summed
    exactly in int32. Block by block, as the one-hots of all tokens would fill the memory.
    """
    N, E = bin_NE.shape
    side = 32
    high_c, low_d = jnp.arange(BINS // side), jnp.arange(side)
    bin_nbE = jnp.pad(bin_NE, ((0, -N % block), (0, 0)), constant_values=-1).reshape(-1, block, E)

    def add(total_Ecd: jax.Array, bin_bE: jax.Array) -> tuple[jax.Array, None]:
        high_bEc = ((bin_bE // side)[..., None] == high_c[None, None]).astype(jnp.bfloat16)
        low_bEd = ((bin_bE % side)[..., None] == low_d[None, None]).astype(jnp.bfloat16)
        count_Ecd = jnp.einsum(
            "bEc,bEd->Ecd", high_bEc, low_bEd, preferred_element_type=jnp.float32
        )
        return total_Ecd + count_Ecd.astype(jnp.int32), None

    zeros_Ecd = jnp.zeros((E, BINS // side, side), jnp.int32)
    return jax.lax.scan(add, zeros_Ecd, bin_nbE)[0].reshape(E, BINS)
