"""Causal depthwise convolution over a few tokens, reset at document boundaries."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.layers.param import fan_in, param


def short_conv(x_BTC: jax.Array, w_JC: jax.Array, document_BT: jax.Array) -> jax.Array:
    """y_t = sum_j w_j x_{t-j}, over those j whose token belongs to the document of t.

    `document_BT` is int32 and increases along T (`layers/documents.py`), so equality of two ids
    means that no boundary lies between them.
    """
    T = x_BTC.shape[1]
    y_BTC = x_BTC * w_JC[0][None, None]
    for j in range(1, min(w_JC.shape[0], T)):
        same_BT = document_BT[:, j:] == document_BT[:, :-j]
        past_BTC = jnp.where(same_BT[..., None], x_BTC[:, :-j], 0) * w_JC[j][None, None]
        y_BTC = y_BTC + jnp.pad(past_BTC, ((0, 0), (j, 0), (0, 0)))
    return y_BTC


class ShortConv(nn.Module):
    """SiLU of a `short_conv` of `width` tokens, one filter a channel."""

    width: int

    @nn.compact
    def __call__(self, x_BTHK: jax.Array, document_BT: jax.Array) -> jax.Array:
        B, T, H, K = x_BTHK.shape
        w_JC = param(self, "w", fan_in(self.width), (self.width, H * K), "conv channel")
        y_BTC = short_conv(x_BTHK.reshape(B, T, H * K), w_JC.astype(x_BTHK.dtype), document_BT)
        return jax.nn.silu(y_BTC).reshape(B, T, H, K)
