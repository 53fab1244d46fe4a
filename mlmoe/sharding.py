"""Where every array lives: the mesh and the one table from logical axes to mesh axes.

Parameters name their axes where they are declared (`layers/param.py`); activations are pinned by
`constrain`. Nothing else in the project writes a PartitionSpec. Today there is one mesh axis,
`data`: rows of a batch are split over it and parameters are whole on every device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data",)

# Logical axis -> mesh axis. An axis that is not here is whole on every device.
RULES = {"batch": "data"}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-axis mesh over all devices (or those given). Axis types are Auto: XLA propagates."""
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh((len(devices),), MESH_AXES, axis_types=(AxisType.Auto,), devices=devices)


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


def per_shard(
    f: Callable[..., tuple[jax.Array, Any]],
    rows: tuple[jax.Array, ...],
    whole: tuple[Any, ...],
) -> tuple[jax.Array, Any]:
    """f(*rows, *whole) -> (y, parts), run by every device on its own rows of the batch.

    `rows` and y are split along their first axis; `whole` is the same everywhere. Each leaf of
    `parts` gets a leading axis with one entry a device (one, outside a mesh): summing it is left to
    the caller, who can do it once for many layers and micro-batches. For what XLA cannot split by
    itself, such as a sort over tokens.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def local(*args: Any) -> tuple[jax.Array, Any]:
        y, parts = f(*args)
        return y, jax.tree.map(lambda x: x[None], parts)

    if mesh.empty:
        return local(*rows, *whole)

    split = spec(("batch",))
    specs = (split,) * len(rows) + (PartitionSpec(),) * len(whole)
    # check_vma=False: expert_ffn's own backward rule cannot insert the sum over shards that the
    # gradient of a replicated weight needs; without the check shard_map inserts it.
    sharded = jax.shard_map(local, in_specs=specs, out_specs=(split, split), check_vma=False)
    return sharded(*rows, *whole)
