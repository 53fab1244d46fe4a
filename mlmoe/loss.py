"""Token-weighted cross entropy over the vocabulary, in pieces; all float32.

    nll_t = logsumexp_w(x_t . head_w) - x_t . head_target,   loss = sum weight nll / sum weight

Sums, not means, leave this file: micro-batches and devices add them and divide once, so k
micro-batches equal one large batch whatever their padding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
    """Sums over the real targets of a batch."""

    nats: jax.Array  # negative log-likelihood
    z2: jax.Array  # squared log-partition, for the z-loss
    tokens: jax.Array  # total weight
    correct: jax.Array  # weight of targets that were the most likely token


def cross_entropy(
    x_BTD: jax.Array, head_DW: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, chunk: int
) -> LossSums:
    """Sums of the loss over a batch; at most [B, T, chunk] logits exist at a time."""
    lse_BT, target_BT, best_BT = token_logits(x_BTD, head_DW, targets_BT, chunk)
    hit_BT = (target_BT >= best_BT).astype(jnp.float32)
    return LossSums(
        nats=jnp.sum(weights_BT * (lse_BT - target_BT)),
        z2=jnp.sum(weights_BT * jnp.square(lse_BT)),
        tokens=jnp.sum(weights_BT),
        correct=jnp.sum(weights_BT * hit_BT),
    )


def token_logits(
    x_BTD: jax.Array, head_DW: jax.Array, targets_BT: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token's logits their logsumexp, the target's and the largest, [B, T] f32 each.

    The vocabulary goes through in chunks with a running maximum and sum (as in flash attention);
    each chunk's logits are recomputed in the backward pass. One chunk (W <= chunk) keeps them.
    """
    if chunk < head_DW.shape[1]:
        return _chunked(x_BTD, head_DW, targets_BT, chunk)
    all_BTW = logits(x_BTD, head_DW)
    target_BT = jnp.take_along_axis(all_BTW, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(all_BTW, axis=-1), target_BT, jnp.max(all_BTW, axis=-1)


def logits(x_BTD: jax.Array, head_DW: jax.Array) -> jax.Array:
    """[B, T, W] in float32."""
    return jnp.einsum(
        "BTD,DW->BTW", x_BTD, head_DW.astype(x_BTD.dtype), preferred_element_type=jnp.float32
    )


def _chunked(
    x_BTD: jax.Array, head_DW: jax.Array, targets_BT: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    D, W = head_DW.shape
    head_nDC = jnp.moveaxis(head_DW.reshape(D, W // chunk, chunk), 1, 0)

    @jax.checkpoint
    def step(carry, piece):  # type: ignore[no-untyped-def]
        best_BT, sum_BT, target_BT = carry
        head_DC, first = piece
        logits_BTC = logits(x_BTD, head_DC)
        # The shift by the running maximum cancels in the gradient; it only guards exp.
        new_BT = jnp.maximum(best_BT, jax.lax.stop_gradient(jnp.max(logits_BTC, axis=-1)))
        sum_BT = sum_BT * jnp.exp(best_BT - new_BT) + jnp.sum(
            jnp.exp(logits_BTC - new_BT[..., None]), axis=-1
        )
        local_BT = jnp.clip(targets_BT - first, 0, chunk - 1)
        here_BT = jnp.take_along_axis(logits_BTC, local_BT[..., None], axis=-1)[..., 0]
        inside_BT = (targets_BT >= first) & (targets_BT < first + chunk)
        return (new_BT, sum_BT, jnp.where(inside_BT, here_BT, target_BT)), None

    low_BT = jnp.full(targets_BT.shape, -jnp.inf, jnp.float32)
    start = (low_BT, jnp.zeros_like(low_BT), jnp.zeros_like(low_BT))
    first_n = jnp.arange(0, W, chunk)
    (best_BT, sum_BT, target_BT), _ = jax.lax.scan(step, start, (head_nDC, first_n))
    return best_BT + jnp.log(sum_BT), target_BT, best_BT
