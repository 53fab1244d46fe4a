"""Normalisations, always computed in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.layers.param import ones, param


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis; returns x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * jnp.broadcast_to(gain, y.shape)).astype(x.dtype)


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(sum(x^2) + eps): eps inside the root, so an all-zero row has a finite gradient."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain, over the last axis."""

    eps: float
    axis: str = "norm"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, param(self, "gain", ones, (x.shape[-1],), self.axis), self.eps)
