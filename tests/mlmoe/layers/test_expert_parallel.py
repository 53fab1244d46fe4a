"""Experts over a mesh axis against all experts on one device: values, all gradients, drops."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers import exchange
from mlmoe.layers.expert_parallel import expert_parallel_ffn
from mlmoe.sharding import EXPERT, make_mesh, per_shard
from pallas_kernels.expert_dispatch import expert_ffn

N, A, E, R, F = 64, 3, 16, 6, 10
NAMES = ("y", "dz", "dweights", "dw_in", "dw_out")


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):  # type: ignore[no-untyped-def]
    """What `jax.lax.ragged_all_to_all` documents, from all_gather; but worse than it.

    Rows that nobody sends are filled with NaN (or a large number), so that a result which reads
    one shows it, and so is everything when sizes disagree or a slice leaves its array.
    """
    bad = jnp.array(jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else 2**30, output.dtype)
    everyones, me = partial(jax.lax.all_gather, axis_name=axis_name), jax.lax.axis_index(axis_name)
    data, first_SS, size_SS, at_SS = map(
        everyones, (operand, input_offsets, send_sizes, output_offsets)
    )
    row_K = jnp.arange(output.shape[0])
    result, fine = jnp.full_like(output, bad), True
    for j in range(data.shape[0]):
        first, size, at = first_SS[j, me], size_SS[j, me], at_SS[j, me]
        fine &= (size == recv_sizes[j]) & (first >= 0) & (at >= 0)
        fine &= (first + size <= operand.shape[0]) & (at + size <= output.shape[0])
        hit_K1 = ((row_K >= at) & (row_K < at + size))[:, None]
        rows_KR = data[j][jnp.clip(first + row_K - at, 0, operand.shape[0] - 1)]
        result = jnp.where(hit_K1, rows_KR, result)
    return jnp.where(fine, result, bad)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ragged_all_to_all", emulated)


def test_the_emulation_does_what_the_documentation_of_jax_shows() -> None:
    """The example of its docstring: two devices; rows that nobody sends are made bad on purpose."""
    mesh, split = make_mesh(jax.devices()[:2], expert=2), jax.P(EXPERT)
    data = jnp.int32([1, 2, 2, 3, 4, 0])[:, None]
    inputs, sends = jnp.int32([0, 1, 0, 1]), jnp.int32([1, 2, 1, 1])
    outputs, receives = jnp.int32([0, 0, 1, 2]), jnp.int32([1, 1, 2, 1])

    def f(*args):  # type: ignore[no-untyped-def]
        data, *rest = args
        return emulated(data, jnp.zeros((4, 1), jnp.int32), *rest, axis_name=EXPERT)

    run = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    bad = 2**30
    got = run(data, inputs, sends, outputs, receives)
    np.testing.assert_array_equal(got[:, 0], [1, 3, bad, bad, 2, 2, 4, bad])


def arguments(dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """z, weights, w_in, w_out and the cotangent of y."""
    rng = np.random.default_rng(0)
    shapes = ((N, R), (N, A), (E, 2, R, F), (E, F, R), (N, R))
    z, p, w_in, w_out, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return z.astype(dtype), jnp.abs(p), w_in.astype(dtype), w_out.astype(dtype), dy.astype(dtype)


def distinct(seed: int = 0, choose_from: Any = range(E)) -> np.ndarray:
    """A distinct experts a token, some far more popular than others."""
    rng, names = np.random.default_rng(seed), np.asarray(choose_from)
    score = rng.gumbel(size=(N, names.size)) + 2 * rng.normal(size=names.size)
    return names[np.argsort(-score, axis=1)[:, :A]].astype(np.int32)


def with_rows(experts_NA: np.ndarray, rows: Any, value: Any) -> np.ndarray:
    experts_NA = experts_NA.copy()
    experts_NA[rows] = value
    return experts_NA


# With 8 shards a shard has 2 experts, with 2 it has 8: choices share a shard in every case.
ROUTES = {
    "skewed": distinct(),
    "all to one shard": np.tile(np.int32([1, 0, 1]), (N, 1)),
    "all to the last shard, padding first": with_rows(distinct(1, [13, 14, 15]), slice(0, 20), -1),
    "the first and the third quarter get nothing": distinct(2, [4, 5, 6, 7, 12, 13, 14, 15]),
    "padding between, choices missing": with_rows(distinct(3), [0, 5, 6, 40, 63], [-1, E, -5]),
    "some choices missing": np.where(distinct(4) < 5, -1, distinct(4)).astype(np.int32),
    "all padding": np.full((N, A), -1, np.int32),
}


def run(shards: int, transport: str, buffer: float = 0.0) -> Any:
    """(experts, *arguments) -> ((y, *gradients), dropped) on a mesh of (8 / shards, shards)."""
    mesh = make_mesh(expert=shards)

    def f(experts_NA, z_NR, weights_NA, *matrices):  # type: ignore[no-untyped-def]
        def local(*args):  # type: ignore[no-untyped-def]
            return expert_parallel_ffn(
                *args, activation="capped", axis=EXPERT, transport=transport, buffer=buffer
            )

        return per_shard(local, (z_NR, experts_NA, weights_NA), (), matrices)

    @jax.jit
    def values_and_gradients(experts_NA, *args):  # type: ignore[no-untyped-def]
        *args, dy_NR = args
        y_NR, pull, dropped_8 = jax.vjp(partial(f, experts_NA), *args, has_aux=True)
        return (y_NR, *pull(dy_NR)), jnp.sum(dropped_8)

    def call(*args):  # type: ignore[no-untyped-def]
        with jax.set_mesh(mesh):
            return values_and_gradients(*args)

    return call


@jax.jit
def on_one_device(experts_NA, z_NR, weights_NA, w_in, w_out, dy_NR):  # type: ignore[no-untyped-def]
    f = partial(expert_ffn, activation="capped", implementation="ref")
    y_NR, pull = jax.vjp(lambda z, p, *w: f(z, experts_NA, p, *w), z_NR, weights_NA, w_in, w_out)
    return y_NR, *pull(dy_NR)


def error(got: Any, want: Any) -> float:
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return float(np.sqrt(np.mean((got - want) ** 2)) / max(np.sqrt(np.mean(want**2)), 1e-30))


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("transport", ["gather", "ragged"])
def test_equals_one_device(transport: str, shards: int) -> None:
    f = run(shards, transport)
    for route, experts_NA in ROUTES.items():
        got, dropped = f(experts_NA, *arguments())
        want = on_one_device(experts_NA, *arguments())
        assert int(dropped) == 0
        for name, g, w in zip(NAMES, got, want, strict=True):
            assert error(g, w) < 1e-5, (route, name)


def kept_by_hand(experts_NA: np.ndarray, shards: int, buffer: float) -> np.ndarray:
    """The routes with those of dropped rows set to -1: what a buffer should do, one row at a time.

    Each group of `shards` devices, N / 8 tokens each, fills buffers of its own.
    """
    kept = experts_NA.copy()
    group = N // (8 // shards)
    limit = math.ceil(buffer * (N // 8) * A)
    real_NA = (experts_NA >= 0) & (experts_NA < E)
    for start in range(0, N, group):
        for shard in range(shards):
            taken, full = 0, False
            for n in range(start, start + group):
                here = real_NA[n] & (experts_NA[n] // (E // shards) == shard)
                full |= taken + here.sum() > limit
                taken += 0 if full else here.sum()
                kept[n][here & full] = -1
    return kept


@pytest.mark.parametrize(("shards", "buffer"), [(8, 1.0), (4, 1.3), (2, 1.0)])
def test_a_tight_buffer_drops_counts_and_leaves_the_rest_alone(shards: int, buffer: float) -> None:
    f, drops = run(shards, "ragged", buffer), []
    for route, experts_NA in ROUTES.items():
        kept_NA = kept_by_hand(experts_NA, shards, buffer)
        real = lambda e: ((e >= 0) & (e < E)).sum()  # noqa: E731
        drops.append(int(real(experts_NA) - real(kept_NA)))
        got, dropped = f(experts_NA, *arguments())
        assert int(dropped) == drops[-1], route
        for name, g, w in zip(NAMES, got, on_one_device(kept_NA, *arguments()), strict=True):
            assert error(g, w) < 1e-5, (route, name)
        lost_N = (kept_NA < 0).all(axis=1) | (kept_NA >= E).all(axis=1)
        np.testing.assert_array_equal(np.asarray(got[0])[lost_N], 0.0)
    assert max(drops) > 50 and min(drops) == 0


@pytest.mark.parametrize("buffer", [0.0, 1.5])
def test_bf16(buffer: float) -> None:
    experts_NA = distinct(7)
    exact = [a.astype(jnp.float32) for a in arguments(jnp.bfloat16)]
    got, _ = run(4, "ragged", buffer)(experts_NA, *arguments(jnp.bfloat16))
    want = on_one_device(kept_by_hand(experts_NA, 4, buffer or 99.0), *exact)
    assert got[0].dtype == jnp.bfloat16 and got[2].dtype == jnp.float32
    assert error(got[0], want[0]) < 5e-3
    assert max(map(error, got[1:], want[1:])) < 2e-2


def test_a_row_goes_once_to_each_shard() -> None:
    sends = exchange.list_sends(jnp.int32([[0, 5, 1], [7, -1, 6], [8, 2, 0]]), 8, 4)
    live = np.asarray(sends.pairs_K) > 0  # 8 is no expert of 8
    rows = zip(sends.shard_K[live], sends.token_K[live], sends.pairs_K[live], strict=True)
    want = [(0, 0, 2), (0, 2, 1), (1, 2, 1), (2, 0, 1), (3, 1, 2)]
    assert [tuple(map(int, row)) for row in rows] == want
    np.testing.assert_array_equal(sends.row_NA[:2, ::2], [[0, 0], [4, 4]])
    np.testing.assert_array_equal(sends.column_NA[:2, ::2], [[0, 1], [0, 1]])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"buffer is 0.5; it must be 0 .* or at least 1"):
        run(2, "ragged", 0.5)(ROUTES["skewed"], *arguments())
    with pytest.raises(ValueError, match="transport is 'ring'; the choices are gather, ragged"):
        run(2, "ring")(ROUTES["skewed"], *arguments())
