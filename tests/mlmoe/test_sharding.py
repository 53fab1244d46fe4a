"""The one table from logical to mesh axes."""

import jax
import jax.numpy as jnp

from mlmoe.sharding import constrain, make_mesh, sharding, spec


def test_batch_is_split_and_parameters_are_whole() -> None:
    mesh = make_mesh()
    assert mesh.shape == {"data": 8}
    assert spec(("batch", "time", "embed")) == jax.sharding.PartitionSpec("data", None, None)
    assert sharding(mesh).is_fully_replicated
    assert not sharding(mesh, "batch", "time").is_fully_replicated


def test_constrain_pins_inside_a_mesh_and_is_nothing_outside() -> None:
    x = jnp.zeros((16, 4))
    assert constrain(x, "batch", "time") is x
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "batch", "time"))(x)
    assert y.sharding.is_equivalent_to(sharding(mesh, "batch", "time"), 2)
