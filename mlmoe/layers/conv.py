"""Causal depthwise convolution over a few tokens, reset at document boundaries."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.layers.param import fan_in, param


def short_conv(x_BTC: jax.Array, w_JC: jax.Array, document_BT: jax.Array) -> jax.Array:
    """y_t = sum_j w_j x_{t-j}, over those j whose token belongs to the document of t.

    `document_BT` is int32 and increases along T (`bounded_decay.document_ids`), so equality of two
    ids means that no boundary lies between them.
    """
    T = x_BTC.shape[1]
    y_BTC = x_BTC * w_JC[0][None, None]
    for j in range(1, min(w_JC.shape[0], T)):
        same_BT = document_BT[:, j:] == document_BT[:, :-j]
        past_BTC = jnp.where(same_BT[..., None], x_BTC[:, :-j], 0) * w_JC[j][None, None]
        y_BTC = y_BTC + jnp.pad(past_BTC, ((0, 0), (j, 0), (0, 0)))
    return y_BTC


def after(
    history_BJC: jax.Array, x_BTC: jax.Array, document_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """x and its documents with J earlier inputs before them, which the first document continues."""
    J, real_BT = history_BJC.shape[1], document_BT > 0
    first_B1 = jnp.take_along_axis(document_BT, jnp.argmax(real_BT, 1)[:, None], 1)
    earlier_BJ = jnp.broadcast_to(first_B1, (first_B1.shape[0], J))
    joined = jnp.concatenate([history_BJC.astype(x_BTC.dtype), x_BTC], 1)
    return joined, jnp.concatenate([earlier_BJ, document_BT], 1)


def last_inputs(x_BTC: jax.Array, document_BT: jax.Array, J: int) -> jax.Array:
    """The J inputs up to the last real token, 0 where they are of another document.

    x begins with a history of J, as `after` makes it: without a real token that is what is kept.
    """
    time_T = jnp.arange(x_BTC.shape[1])
    real_BT = (document_BT > 0) & (time_T >= J)[None]
    last_B1 = jnp.max(jnp.where(real_BT, time_T[None], J - 1), 1, keepdims=True)
    at_BJ = last_B1 + jnp.arange(1 - J, 1)[None]
    same_BJ = jnp.take_along_axis(document_BT, at_BJ, 1) == jnp.take_along_axis(
        document_BT, jnp.maximum(last_B1, 0), 1
    )
    kept_BJC = jnp.take_along_axis(x_BTC, at_BJ[..., None], 1)
    return jnp.where(same_BJ[..., None], kept_BJC, 0)


class ShortConv(nn.Module):
    """SiLU of a `short_conv` of `width` tokens, one filter a channel.

    `history_BJHK`, the width - 1 inputs before x, makes x the continuation of a sequence. Returns
    what is the history of the tokens that follow, None if none was given.
    """

    width: int

    @nn.compact
    def __call__(
        self, x_BTHK: jax.Array, document_BT: jax.Array, history_BJHK: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        B, T, H, K = x_BTHK.shape
        w_JC = param(self, "w", fan_in(self.width), (self.width, H * K), "conv channel")
        w_JC, x_BTC = w_JC.astype(x_BTHK.dtype), x_BTHK.reshape(B, T, H * K)
        if history_BJHK is None:
            y_BTC = short_conv(x_BTC, w_JC, document_BT)
            return jax.nn.silu(y_BTC).reshape(B, T, H, K), None
        J = self.width - 1
        x_BTC, document_BT = after(history_BJHK.reshape(B, J, H * K), x_BTC, document_BT)
        y_BTC = short_conv(x_BTC, w_JC, document_BT)[:, J:]
        history_BJC = last_inputs(x_BTC, document_BT, J)
        return jax.nn.silu(y_BTC).reshape(B, T, H, K), history_BJC.reshape(B, J, H, K)
