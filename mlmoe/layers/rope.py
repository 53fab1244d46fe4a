"""Rotary position embedding: pairs are (first half, second half) of the last axis."""

import jax
import jax.numpy as jnp


def rotate(x_BTHK: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotates pair i of width K by angle position * theta^(-2i/K).

    Angles are float32 from integer positions: in bfloat16, positions above 256 already collide.
    """
    K = x_BTHK.shape[-1]
    frequency_K = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle_BTK = jnp.einsum("BT,K->BTK", positions_BT.astype(jnp.float32), frequency_K)
    cos, sin = jnp.cos(angle_BTK)[:, :, None], jnp.sin(angle_BTK)[:, :, None]
    a, b = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)
