"""Linear maps, written as einsums with the letters of their arrays."""

import jax
import jax.numpy as jnp


def project(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """einsum(equation, x, w) with the f32 parameter w rounded to x's dtype."""
    return jnp.einsum(equation, x, w.astype(x.dtype))
