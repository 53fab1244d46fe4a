"""What only the kernels have: tiles, blocks, memory that nobody wrote, races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.expert_dispatch import blocks, ref, tpu
from pallas_kernels.expert_dispatch.rows import rows_in_tiles

ROUTES = {
    "mixed": [[0, 2], [5, 0], [-1, 2], [2, 0], [7, -1], [2, 5]],  # 1, 3 and 4 of 0 .. 5 are empty
    "none": [[-1, -1]] * 3,
    "all to the last": [[5]] * 19,
}


@pytest.mark.parametrize("experts_NA", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("tm", [1, 4, 16])
def test_rows_in_tiles(experts_NA, tm):
    """Each pair has a row of its own, in a tile visited with its expert, among the first rows."""
    experts_NA, E = np.array(experts_NA), 6
    rows = jax.tree.map(
        np.asarray, jax.jit(rows_in_tiles, static_argnums=(1, 2))(experts_NA, E, tm)
    )
    real_NA = (experts_NA >= 0) & (experts_NA < E)
    np.testing.assert_array_equal(rows.real_NA, real_NA)
    pairs = np.arange(experts_NA.size).reshape(experts_NA.shape)
    np.testing.assert_array_equal(rows.pair_M[rows.place_NA[real_NA]], pairs[real_NA])
    assert len(set(rows.place_NA[real_NA])) == real_NA.sum()

    for visits in (rows.visits, rows.visits_of_all):
        seen = slice(int(visits.number))
        experts, tiles, owned = (v[seen] for v in visits[:3])
        assert seen.stop <= len(visits.tile_V) and np.all(np.diff(experts) >= 0)
        assert np.all((tiles >= 0) & (tiles * tm < len(rows.pair_M)))
        for place, expert in zip(rows.place_NA[real_NA], experts_NA[real_NA], strict=True):
            v = np.flatnonzero((tiles == place // tm) & (owned > 0))
            assert len(v) == 1 and experts[v[0]] == expert and place % tm < owned[v[0]]
        assert owned.sum() == real_NA.sum()
    assert set(rows.visits_of_all.expert_V[: int(rows.visits_of_all.number)]) == set(range(E))
    assert rows.visits.number >= 1  # a grid of no steps is not a grid


def test_blocks_at_full_scale():
    """R = 3584, F = 3072, P = 3, 1,170 rows an expert: an even number of blocks for two cores."""
    assert blocks.tile_rows(16384, 14, jnp.bfloat16) == 256
    assert blocks.tile_rows(2, 896, jnp.bfloat16) == 16 and blocks.tile_rows(2, 2, jnp.float32) == 8
    assert blocks.columns(3072, 2, fixed=256 * 3584, per_column=3 * 3584, sums=768) == 768
    assert blocks.corner(3584, 3072, 3, 256, 2) == (1792, 768)
    assert blocks.columns(384, 2, fixed=0, per_column=1, sums=1) == 384  # odd, but one core is idle
    with pytest.raises(
        ValueError, match=r"blocks of 128 of 256 columns .* implementation='sorted'"
    ):
        blocks.columns(256, 2, fixed=44 << 20, per_column=1, sums=1)


def test_the_tile_changes_rounding_only(narrow_blocks, monkeypatch):
    found = []
    for tm in (8, 32):
        monkeypatch.setattr(blocks, "tile_rows", lambda *_, tm=tm: tm)
        found.append(jax.jit(lambda: _everything(True))())
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_no_races_and_nothing_uninitialised_is_read(narrow_blocks):
    """The TPU interpreter: memory starts as NaN, copies are asynchronous, races are looked for."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    found = jax.jit(lambda: _everything(params))()
    for got, want in zip(found, jax.jit(lambda: _everything(None))(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    try:  # jax 0.10 notes a race instead of raising
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
    except ImportError:
        return
    assert not getattr(getattr(interpreter, "races", None), "races_found", False)


def test_a_bad_token_reaches_its_own_expert_only(narrow_blocks):
    """Tiles are filled up with whatever rows, also with token 0's: no gradient may see them."""
    clean = jax.jit(lambda: _everything(True))()
    y, dx, dweights, dw_in, dw_out = jax.jit(lambda: _everything(True, bad=1))()
    rest, (first, second) = np.arange(21) != 1, _experts()[1]
    for got, want in zip((y, dx, dweights), clean[:3], strict=True):
        np.testing.assert_array_equal(got[rest], want[rest])
    others = np.setdiff1d(np.arange(6), [first, second])
    for got, want in zip((dw_in, dw_out), clean[3:], strict=True):
        np.testing.assert_array_equal(got[others], want[others])
        assert np.isnan(got[first]).any() and np.isnan(got[second]).any()


def _experts():
    experts_NA = np.random.default_rng(0).integers(0, 5, size=(21, 2)).astype(np.int32)
    experts_NA[[0, 7, 8, 20]] = -1
    experts_NA[3, 1] = -1
    return experts_NA


def _everything(interpret, bad=None):
    """(y, all gradients) of 21 tokens, four of them NaN and without expert; expert 5 is unused.

    bad: one more token that is NaN."""
    rng, experts_NA = np.random.default_rng(1), _experts()
    (N, A), E, P, R, F = experts_NA.shape, 6, 2, 6, 10
    shapes = (N, R), (N, A), (E, P, R, F), (E, F, R), (N, R)
    x, weights, w_in, w_out, dy = (rng.normal(size=s).astype(np.float32) for s in shapes)
    for rows in (x, weights, dy):
        rows[[0, 7, 8, 20]] = np.nan
    if bad is not None:
        x[bad] = np.nan

    def run(x, weights, w_in, w_out):
        args = x, experts_NA, weights, w_in, w_out, "capped"
        if interpret is None:
            return ref.expert_ffn(*args)
        return tpu.expert_ffn(*args, interpret=interpret)

    y, pull = jax.vjp(run, *map(jnp.asarray, (x, weights, w_in, w_out)))
    return y, *pull(jnp.asarray(dy))
