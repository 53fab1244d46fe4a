"""Where every array lives: the mesh and the one table from logical axes to mesh axes.

Parameters name their axes where they are declared (`layers/param.py`); activations are pinned by
`constrain`. Nothing else in the project writes a PartitionSpec. The mesh has two axes, `data` and
`expert`. Rows of a batch are split over both together, so every device has its own tokens; routed
experts, and what the optimizer keeps of them, are split over `expert`; all else is whole on every
device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA, EXPERT = MESH_AXES = ("data", "expert")

# Logical axis -> mesh axes. An axis that is not here is whole on every device.
RULES = {"batch": MESH_AXES, "expert": EXPERT}


def make_mesh(devices: Sequence[jax.Device] | None = None, expert: int = 1) -> Mesh:
    """All devices (or those given) as (data, expert), `expert` of them along the second axis.

    Axis types are Auto: XLA propagates. `expert` must divide the number of devices, as
    `config.check_devices` makes sure.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = (len(devices) // expert, expert)
    if devices[0].platform == "tpu":  # neighbours on the torus; an axis may be a part of a ring
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


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


def tree_specs(tree: Any, axes: Any) -> Any:
    """The PartitionSpec of each leaf of a tree that holds parameters or things shaped like them.

    A leaf whose path ends with the path of a parameter in `axes` (a tree of tuples of logical
    names) is that parameter, or its gradient, or what an optimizer keeps of it. All else is whole.
    """
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    named = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_names))

    def of(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        found = [named[path[i:]] for i in range(len(path)) if path[i:] in named]
        return spec(found[0] if found and len(found[0]) == x.ndim else ())

    return jax.tree_util.tree_map_with_path(of, tree)


def per_part(f: Callable[..., Any], axes: Any) -> Callable[..., Any]:
    """f, run by every device on the parts of its arguments and results that `tree_specs` gives it.

    For a function of parameters that treats each expert by itself, but that XLA cannot split: optax
    merges the axes of layers and experts, which gathers all experts on every device.
    """

    def split(*trees: Any) -> Any:
        if expert_shards() == 1:
            return f(*trees)
        specs = tuple(tree_specs(t, axes) for t in trees)
        out = tree_specs(jax.eval_shape(f, *trees), axes)
        return jax.shard_map(f, in_specs=specs, out_specs=out, check_vma=False)(*trees)

    return split


def expert_shards() -> int:
    """Into how many parts the surrounding mesh splits the experts; 1 outside a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(EXPERT, 1)


def per_shard(
    f: Callable[..., tuple[jax.Array, Any]],
    rows: tuple[jax.Array, ...],
    whole: tuple[Any, ...],
    experts: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, Any]:
    """f(*rows, *whole, *experts) -> (y, parts), run by every device on its own part.

    `rows` and y are split along their first axis as the batch is, `experts` along their first axis
    over the expert axis; `whole` is the same everywhere. Each leaf of `parts` gets a leading axis
    with one entry a device (one, outside a mesh): summing it is left to the caller, who can do it
    once for many layers and micro-batches. Gradients are added up over the devices that hold the
    same part. For what XLA cannot split by itself, such as a sort over tokens.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def local(*args: Any) -> tuple[jax.Array, Any]:
        y, parts = f(*args)
        return y, jax.tree.map(lambda x: x[None], parts)

    if mesh.empty:
        return local(*rows, *whole, *experts)

    split = spec(("batch",))
    specs = (split,) * len(rows) + (spec(()),) * len(whole) + (spec(("expert",)),) * len(experts)
    # check_vma=False: expert_ffn's own backward rule cannot insert the sum over shards that the
    # gradient of a replicated weight needs; without the check shard_map inserts it.
    sharded = jax.shard_map(local, in_specs=specs, out_specs=(split, split), check_vma=False)
    return sharded(*rows, *whole, *experts)
