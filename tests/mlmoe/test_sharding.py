"""The one table from logical to mesh axes, and the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mlmoe.sharding import constrain, expert_shards, make_mesh, per_shard, sharding, spec


def test_batch_is_split_and_parameters_are_whole() -> None:
    mesh = make_mesh()
    assert mesh.shape == {"data": 8, "expert": 1}
    assert spec(("batch", "time", "embed")) == PartitionSpec(("data", "expert"), None, None)
    assert sharding(mesh).is_fully_replicated
    assert not sharding(mesh, "batch", "time").is_fully_replicated


def test_experts_are_split_over_their_axis_and_the_router_is_not() -> None:
    mesh = make_mesh(expert=4)
    assert mesh.shape == {"data": 2, "expert": 4}
    weights = sharding(mesh, "layer", "expert", "part", "latent", "hidden")
    assert weights.spec == PartitionSpec(None, "expert", None, None, None)
    assert sharding(mesh, "embed", "score").is_fully_replicated
    assert sharding(mesh, "batch", "time").shard_shape((16, 3)) == (2, 3)


def test_constrain_pins_inside_a_mesh_and_is_nothing_outside() -> None:
    x = jnp.zeros((16, 4))
    assert constrain(x, "batch", "time") is x and expert_shards() == 1
    mesh = make_mesh(expert=2)
    with jax.set_mesh(mesh):
        assert expert_shards() == 2
        y = jax.jit(lambda x: constrain(x, "batch", "time"))(x)
    assert y.sharding.is_equivalent_to(sharding(mesh, "batch", "time"), 2)


@pytest.mark.parametrize("expert", [1, 2, 8])
def test_gradients_add_up_over_the_devices_that_hold_the_same_part(expert: int) -> None:
    """y_n = x_n w_{shard of n} v: w of a shard meets the rows of its own devices only."""
    x_N, w_E, v = jnp.arange(16.0), jnp.arange(8.0) + 1, jnp.float32(3.0)

    def local(x_N, v, w_E):  # type: ignore[no-untyped-def]
        return x_N * jnp.sum(w_E) * v, jnp.sum(x_N)

    def loss(w_E, v):  # type: ignore[no-untyped-def]
        y_N, totals_8 = per_shard(local, (x_N,), (v,), (w_E,))
        return jnp.sum(y_N), totals_8

    with jax.set_mesh(make_mesh(expert=expert)):
        (dw_E, dv), totals_8 = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(w_E, v)
    shard_N = np.arange(16) // 2 % expert  # device d holds rows 2d, 2d + 1 and shard d mod expert
    sums = np.asarray(w_E).reshape(expert, -1).sum(1)
    seen = np.array([x_N[shard_N == s].sum() for s in range(expert)])
    np.testing.assert_allclose(dw_E, np.repeat(3.0 * seen, 8 // expert))
    np.testing.assert_allclose(dv, (seen * sums).sum())
    np.testing.assert_array_equal(totals_8, np.asarray(x_N).reshape(8, 2).sum(1))
