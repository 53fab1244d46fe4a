"""Seats of experts against seating the tokens one at a time, and what must always hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlmoe.layers.capacity import assign
from mlmoe.sharding import make_mesh, per_shard

run = jax.jit(assign, static_argnums=(3, 4))


def one_at_a_time(choice_BTE: np.ndarray, live_BT: np.ndarray, capacity: float, A: int) -> list:
    """The definition: {(b, t): experts in order of preference} along the line."""
    B, T, E = choice_BTE.shape
    limit = np.ceil(live_BT.sum() * A / E * capacity - 1e-9)
    room, found = np.full(E, limit), {}
    for t in range(T):
        for b in range(B):
            if live_BT[b, t]:
                order = np.argsort(-choice_BTE[b, t], kind="stable")
                found[b, t] = [e for e in order if room[e] > 0][:A]
                room[found[b, t]] -= 1
    return [sorted(found.get((b, t), [])) for b in range(B) for t in range(T)]


def inputs(B: int, T: int, E: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Skewed scores, so that experts overflow, and some padding at the end of the first row."""
    rng = np.random.default_rng(seed)
    choice_BTE = (rng.normal(size=(B, T, E)) + 1.5 * rng.normal(size=E)).astype(np.float32)
    live_BT = np.ones((B, T), bool)
    live_BT[0, T - T // 4 :] = False
    return choice_BTE, live_BT


def chosen(experts_NA: jax.Array) -> list:
    return [sorted(e for e in row if e >= 0) for row in np.asarray(experts_NA).tolist()]


@pytest.mark.parametrize("shape", [(1, 1, 4, 2), (2, 17, 8, 2), (3, 40, 12, 3), (1, 65, 7, 6)])
@pytest.mark.parametrize("capacity", [1.0, 1.3, np.inf])
def test_it_is_seating_the_tokens_one_at_a_time(
    shape: tuple[int, int, int, int], capacity: float
) -> None:
    *sizes, A = shape
    choice_BTE, live_BT = inputs(*sizes)
    experts, rerouted, dropped = run(choice_BTE, live_BT, jnp.float32(capacity), A, 1000)
    want = one_at_a_time(choice_BTE, live_BT, capacity, A)
    assert chosen(experts) == want
    first = np.argsort(-choice_BTE, -1, kind="stable")[..., :A].reshape(-1, A)
    assert int(rerouted) == sum(len(set(w) - set(f)) for w, f in zip(want, first, strict=True))
    assert int(dropped) == int(live_BT.sum()) * A - sum(map(len, want))


def test_rounding_gives_no_expert_a_seat_more() -> None:
    """100 tokens, 2 of 16 experts, factor 1.2: 15 seats exactly, 15.000001 in float32."""
    choice_BTE = np.zeros((1, 100, 16), np.float32)
    experts, _, _ = run(choice_BTE, np.ones((1, 100), bool), jnp.float32(1.2), 2, 20)
    assert np.bincount(np.asarray(experts)[np.asarray(experts) >= 0]).max() == 15


@pytest.mark.parametrize("rounds", [0, 1, 3, 20])
def test_the_limit_holds_however_few_the_rounds(rounds: int) -> None:
    choice_BTE, live_BT = inputs(2, 64, 16, seed=1)
    experts, _, dropped = run(choice_BTE, live_BT, jnp.float32(1.0), 4, rounds)
    load_E = np.bincount(np.asarray(experts)[np.asarray(experts) >= 0], minlength=16)
    assert load_E.max() <= np.ceil(live_BT.sum() * 4 / 16)
    assert all(len(set(row)) == len(row) for row in chosen(experts))
    assert int(dropped) == live_BT.sum() * 4 - load_E.sum()


@pytest.mark.parametrize("rounds", [1, 20])
def test_later_tokens_of_a_row_change_nothing_earlier(rounds: int) -> None:
    choice_BTE, live_BT = inputs(1, 48, 8, seed=2)
    live_BT[:] = True
    changed = choice_BTE.copy()
    changed[:, 30:] = -changed[:, 30:]
    a, b = (run(x, live_BT, jnp.float32(1.0), 2, rounds)[0] for x in (choice_BTE, changed))
    np.testing.assert_array_equal(a[:30], b[:30])
    assert np.any(np.asarray(a[30:]) != np.asarray(b[30:]))


def test_every_device_keeps_to_its_own_limit() -> None:
    """The line is a device's own tokens: no device waits for another to seat them."""
    choice_BTE, live_BT = inputs(8, 40, 12, seed=3)
    live_BT[:] = True

    def local(choice_BTE: jax.Array, live_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts_NA, _, dropped = assign(choice_BTE, live_BT, jnp.float32(1.0), 3, 20)
        return experts_NA, dropped

    with jax.set_mesh(make_mesh()):
        experts, dropped = jax.jit(lambda *x: per_shard(local, x, ()))(choice_BTE, live_BT)
    alone = [
        run(c[None], w[None], jnp.float32(1.0), 3, 20)
        for c, w in zip(choice_BTE, live_BT, strict=True)
    ]
    np.testing.assert_array_equal(experts, np.concatenate([a[0] for a in alone]))
    np.testing.assert_array_equal(dropped, [a[2] for a in alone])
    load_dE = [np.bincount(x[x >= 0], minlength=12) for x in np.split(np.asarray(experts), 8)]
    assert np.max(load_dE) <= 40 * 3 / 12
