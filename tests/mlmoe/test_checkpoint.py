"""Checkpoints: what comes back is what went in, bit for bit, on any devices, or a plain error."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from mlmoe.checkpoint import Checkpoints
from mlmoe.errors import UserError

META = {"config": {"lr": 1e-3}, "fingerprint": "abc"}


class State(NamedTuple):
    step: jax.Array
    params: dict[str, Any]
    opt_state: Any
    keys: Any
    empty: jax.Array


def make_state(seed: int) -> State:
    """Every kind of leaf: bf16, int32, bool, uint8, scalars, no elements, typed keys, optax."""
    key = jax.random.key(seed)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    kernel_DF = jax.random.normal(key, (64, 32))
    params = {
        "layers/0": {
            "kernel": jax.device_put(
                kernel_DF, NamedSharding(mesh, PartitionSpec("data", "model"))
            ),
            "scale": jax.device_put(
                jnp.arange(16.0, dtype=jnp.bfloat16) + seed,
                NamedSharding(mesh, PartitionSpec("model")),
            ),
        },
        "extremes": jnp.array([jnp.finfo(jnp.float32).max] * 2 + [1e-40, -0.0], jnp.float32),
        "counts": jnp.arange(7, dtype=jnp.int32) * seed,
        "mask": jnp.array([True, False, True]),
        "bytes": jnp.arange(5, dtype=jnp.uint8),
    }
    floats = {"layers/0": params["layers/0"]}
    opt_state = jax.tree.map(lambda x: x + seed, optax.adamw(1e-3).init(floats))
    keys = {"one": key, "rbg": jax.random.split(jax.random.key(seed, impl="rbg"), 3)}
    return State(jnp.int32(seed), params, opt_state, keys, jnp.zeros((0, 3)))


def abstract(state: Any, sharding: Any = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
    )


def bits(tree: Any) -> list[bytes]:
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    raw = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x).tobytes() for x in raw]


def save_steps(workdir: Path, *steps: int, keep: int = 9) -> None:
    with Checkpoints(workdir, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), data_state={"row": step}, meta=META)


def restore(workdir: Path, **kwargs: Any) -> tuple[Any, list[str]]:
    told: list[str] = []
    with Checkpoints(workdir, keep=9) as checkpoints:
        found = checkpoints.restore(abstract(make_state(0)), report=told.append, **kwargs)
    return found, told


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("two")
    save_steps(workdir, 10, 20)
    return workdir


def test_roundtrip_is_bitwise_and_keeps_shardings(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    state = make_state(3)
    found, told = restore(tmp_path)
    assert (found.step, found.data_state, found.meta, told) == (3, {"row": 3}, META, [])
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert bits(found.state) == bits(state)
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    assert jax.random.uniform(found.state.keys["one"]) == jax.random.uniform(state.keys["one"])


def test_other_device_counts(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        on_one = checkpoints.restore(
            abstract(make_state(3), SingleDeviceSharding(jax.devices()[5]))
        )
        assert on_one is not None and bits(on_one.state) == bits(make_state(3))
        assert {d for x in jax.tree.leaves(on_one.state) for d in x.devices()} == {jax.devices()[5]}
        checkpoints.save(4, on_one.state, data_state={}, meta={})
    found, _ = restore(tmp_path)
    assert found.step == 4 and len(found.state.params["layers/0"]["kernel"].devices()) == 8
    assert bits(found.state) == bits(make_state(3))


def test_donated_right_after_save(tmp_path: Path) -> None:
    """The saved values are those at the call, though the buffers are overwritten at once."""
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        x = jnp.arange(2.0**20)
        checkpoints.save(0, {"x": x}, data_state={}, meta={})
        y = overwrite(x)
        assert x.is_deleted()  # the checkpoint holds a copy, not a view that would block donation
        overwrite(y)
        found = checkpoints.restore({"x": abstract(y)})
    np.testing.assert_array_equal(found.state["x"], np.arange(2.0**20))


def test_params_alone_can_be_read_by_plain_orbax(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    name = "params.layers/0.kernel"
    kernel_DF = make_state(3).params["layers/0"]["kernel"]
    args = ocp.args.PyTreeRestore(
        item={name: abstract(kernel_DF)},
        restore_args={name: ocp.ArrayRestoreArgs(sharding=kernel_DF.sharding)},
        partial_restore=True,
    )
    got = ocp.PyTreeCheckpointer().restore(tmp_path / "checkpoints/3/state", args=args)
    assert list(got) == [name] and bits(got[name]) == bits(kernel_DF)


def test_nothing_to_restore(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0))) is None
        assert (checkpoints.steps(), checkpoints.latest_meta()) == ([], None)
        assert not (tmp_path / "new").exists()
        with pytest.raises(UserError, match=r"no such directory.*Other complete steps: none"):
            checkpoints.restore(abstract(make_state(0)), step=5)


def test_explicit_step(two_steps: Path) -> None:
    assert restore(two_steps, step=10)[0].step == 10
    with pytest.raises(UserError, match=r"checkpoint 15 .*no such directory.*steps: 10, 20$"):
        restore(two_steps, step=15)


def test_same_step_twice_replaces(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for row, seed in enumerate((1, 2)):
            checkpoints.save(7, make_state(seed), data_state={"row": row}, meta=META)
        found = checkpoints.restore(abstract(make_state(0)))
        assert checkpoints.steps() == [7] and found is not None
        assert found.data_state == {"row": 1} and bits(found.state) == bits(make_state(2))


def test_keeps_the_newest_complete_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/15").mkdir(parents=True)  # damaged: counts for nothing, goes when old
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        seen = []
        for step in (10, 20, 30, 25, 5):
            checkpoints.save(step, {"x": jnp.ones(3)}, data_state={}, meta={})
            # While the new one is being written the old ones are all there.
            assert len(checkpoints.steps()) >= min(len(seen), 2)
            checkpoints.wait()
            seen.append(sorted(os.listdir(tmp_path / "checkpoints")))
    assert seen == [["10", "15"], ["10", "15", "20"], ["20", "30"], ["25", "30"], ["25", "30", "5"]]


def test_other_tree_is_refused_with_leaf_and_shapes(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        x, n = jnp.ones((4, 8)), jnp.int32(1)
        checkpoints.save(1, {"params": {"w": x}, "n": n}, data_state={}, meta={})
        asks = {
            r"leaf params\.w is float32\[4, 8\] there and float32\[4, 9\]": {"w": jnp.ones((4, 9))},
            r"leaf params\.w is float32\[4, 8\] there and bfloat16\[4, 8\]": {
                "w": x.astype(jnp.bfloat16)
            },
            r"has no leaf params\.v; the nearest is params\.w": {"w": x, "v": x},
            r"has a leaf params\.w": {},
        }
        for message, params in asks.items():
            with pytest.raises(UserError, match=message):
                checkpoints.restore(abstract({"params": params, "n": n}))
        with pytest.raises(UserError, match=r"leaf n is int32\[\] there and key<fry>\[\]"):
            checkpoints.restore(abstract({"params": {"w": x}, "n": jax.random.key(0)}))


def test_other_process_count_is_refused(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(two_steps, keep=9) as checkpoints:
        monkeypatch.setattr(jax, "process_count", lambda: 4)
        with pytest.raises(UserError, match="data state of 1 processes, this run has 4"):
            checkpoints.restore(abstract(make_state(0)))
        monkeypatch.undo()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_is_refused(value: float, dtype: str, tmp_path: Path) -> None:
    good = {"a": jnp.ones(4), "w": jnp.ones((3, 5), dtype)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, good, data_state={}, meta={})
        bad = {**good, "w": good["w"].at[1, 2].set(value)}
        with pytest.raises(UserError, match=r"^not saved: w is not finite \(1 of 15 values\)"):
            checkpoints.save(2, bad, data_state={}, meta={})
        assert checkpoints.steps() == [1]
        checkpoints.save(2, good, data_state={}, meta={})
    assert checkpoints.steps() == [2]


def test_bad_arguments(tmp_path: Path) -> None:
    for workdir, keep in (("gs://bucket/run", 1), (tmp_path, 0)):
        with pytest.raises(UserError, match=r"gs://bucket/run|keep is 0"):
            Checkpoints(workdir, keep=keep)
    x = jnp.ones(2)
    bad: list[tuple[int, Any, Any, str]] = [
        (-1, {"x": x}, {}, "step is -1"),
        (1, {"x": 2.0}, {}, "leaf x is 2.0, a float"),
        (1, {"a": {"b": x}, "a.b": x}, {}, "two leaves of the state are named a.b"),
        (1, {"x": x}, {"it": object()}, "data_state is not JSON"),
    ]
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, state, data_state, message in bad:
            with pytest.raises(UserError, match=message):
                checkpoints.save(step, state, data_state=data_state, meta={})
