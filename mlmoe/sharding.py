"""Where every array lives: the mesh and the one table from logical axes to mesh axes.

Parameters name their axes where they are declared (`layers/param.py`); activations are pinned by
`constrain`. Nothing else in the project writes a PartitionSpec. Today there is one mesh axis,
`data`: rows of a batch are split over it and parameters are whole on every device.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data",)

# Logical axis -> mesh axis. An axis that is not here is whole on every device.
RULES = {"batch": "data"}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over all devices (or those given). Axis types are Auto: XLA propagates."""
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh(
        (len(devices),), MESH_AXES, axis_types=(AxisType.Auto,), devices=devices
    )


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions carry these logical names."""
    return PartitionSpec(*(RULES.get(a) if a else None for a in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """`spec` on a mesh: `sharding(mesh, "batch", "time")`; no names means whole everywhere."""
    return NamedSharding(mesh, spec(axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins an activation inside jit; the mesh is the one of the surrounding `jax.set_mesh`."""
    if jax.sharding.get_abstract_mesh().empty:  # a bare call, as in unit tests
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes))
