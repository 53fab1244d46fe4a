"""The one way a layer declares a parameter: init, shape and axes on one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal

ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros


def fan_in(width: int, gain: float = 1.0) -> Initializer:
    """Normal with standard deviation gain / sqrt(width): keeps unit variance through a matmul."""
    return normal(gain * width**-0.5)


def param(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: str
) -> jax.Array:
    """Declares a float32 parameter whose dimensions carry the logical names in `axes`.

    The names decide its sharding (`mlmoe/sharding.py`) and which of its axes Muon treats as a
    matrix (`mlmoe/optim.py`). They travel as flax metadata until `model.init` strips them.
    """
    names = tuple(axes.split())
    assert len(names) == len(shape), f"{name}: {len(shape)} dimensions, axes {axes!r}"
    return module.param(name, nn.with_partitioning(init, names), shape, jnp.float32)
