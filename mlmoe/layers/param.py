"""The one way a layer declares a parameter: init, shape and axes on one line."""

from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal

ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros

# Gain of matrices that write into the residual stream, and of the head: a fresh layer adds little,
# so training starts from the embedding alone and not from a sum of noise.
OUT = 0.1


def fan_in(width: int, gain: float = 1.0) -> Initializer:
    """Normal with standard deviation gain / sqrt(width): keeps unit variance through a matmul."""
    return normal(gain * width**-0.5)


@flax.struct.dataclass
class Named(nn.meta.AxisMetadata):
    """A parameter with the names of its axes. Opening flax's own box would pin shardings."""

    value: Any
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Named":
        return self.replace(value=val)  # type: ignore[attr-defined]

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Named":
        name = params[nn.PARTITION_NAME]
        names = (*self.names[:index], name, *self.names[index:])
        return self.replace(names=names)  # type: ignore[attr-defined]

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Named":
        names = (*self.names[:index], *self.names[index + 1 :])
        return self.replace(names=names)  # type: ignore[attr-defined]


def param(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: str
) -> jax.Array:
    """Declares a float32 parameter whose dimensions carry the logical names in `axes`.

    The names decide its sharding (`mlmoe/sharding.py`) and which of its axes Muon treats as a
    matrix (`mlmoe/optim.py`). They travel as flax metadata until `model.init` strips them.
    """
    names = tuple(axes.split())
    assert len(names) == len(shape), f"{name}: {len(shape)} dimensions, axes {axes!r}"
    value: Any = module.param(name, lambda key: Named(init(key, shape, jnp.float32), names))
    return value  # flax opens the box
