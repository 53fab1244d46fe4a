"""What both TPU kernels share: decays, masks, scores and the triangular inverse of one chunk.

Arrays [H, C, K]: the heads of a block come first, so that each stage is done for all of them before
the next and the compiler can fill one head's waits with another's work. Decays are split into
factors as in tiles.py, which says why: P is the sum of g inside a tile, from 0 at each document,

    own tile       exp(P_i) * exp(-P_j)
    earlier tiles  exp(P_i) * exp(sum of the tiles between) * exp(P at j's tile's end - P_j)

with queries times 2^54 and keys times 2^-54. Masks are applied after the matmuls, by `where`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.tiles import KEY_SCALE, QUERY_SCALE, TILE


def einsum(spec: str, x_H, y_H, dtype, split: str = ""):
    """A matmul for each head, operands rounded to `dtype` and summed in f32; f32 is not rounded.

    split: operands ("x", "y", "xy") that bf16 is too coarse for. They are taken as the sum of two
    bf16, which is exact to 16 bits, and the parts' products summed in one longer matmul; that of
    two small parts is left out.

    Head by head because libtpu 0.0.42 converts the operands of a batched product to bf16 with five
    times the instructions that it needs for a plain one.
    """
    product = functools.partial(
        jnp.einsum,
        spec.replace("H", ""),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if split and dtype != jnp.float32:
        x_axis, y_axis = _contraction(spec)
        (x, x_low), (y, y_low) = _halves(x_H, dtype), _halves(y_H, dtype)
        parts = [(x, y), (x, y_low), (x_low, y)]
        parts = [p for p, name in zip(parts, (" ", "y", "x"), strict=True) if name in split + " "]
        xs, ys = zip(*parts, strict=True)
        x_H, y_H = jnp.concatenate(xs, x_axis), jnp.concatenate(ys, y_axis)
    return jnp.stack(
        [product(x.astype(dtype), y.astype(dtype)) for x, y in zip(x_H, y_H, strict=True)]
    )


def _halves(x_H, dtype):
    high = x_H.astype(dtype)
    return high, (x_H - high.astype(jnp.float32)).astype(dtype)


def _contraction(spec: str) -> tuple[int, int]:
    """The axis that is summed over, in each of the two operands."""
    operands, out = spec.split("->")
    x, y = operands.split(",")
    (summed,) = (set(x) & set(y)) - set(out)
    return x.index(summed), y.index(summed)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def sum_rows(which_CC, x_HCK, dtype):
    """A 0/1 matrix times x, exact to 16 bits of x."""
    which_HCC = jnp.stack([which_CC.astype(dtype)] * x_HCK.shape[0])
    return einsum("HCD,HDK->HCK", which_HCC, x_HCK, dtype, split="y")


def spread(x_HaK, C: int):
    """One row for each tile -> that row at each of the tile's tokens."""
    H, tiles, K = x_HaK.shape
    return jnp.broadcast_to(x_HaK[:, :, None], (H, tiles, C // tiles, K)).reshape(H, C, K)


def column(row_H1C):
    """A value for each token along lanes -> along sublanes, repeated over the lanes: [H, C, C]."""
    H, _, C = row_H1C.shape
    return jnp.broadcast_to(row_H1C, (H, C, C)).swapaxes(1, 2)


class Masks(NamedTuple):
    """Where documents end, for one chunk of all heads."""

    same_CC: jax.Array  # both in one document
    earlier_CC: jax.Array  # that, and j < i
    live_C1: jax.Array  # not padding
    reads_C1: jax.Array  # continues the document of the incoming state
    writes_C1: jax.Array  # in the document the chunk ends with
    keeps_11: jax.Array  # the chunk ends with the incoming state's document

    @classmethod
    def open(cls, document_2C: jax.Array) -> "Masks":
        """From rows (document, negative at padding: -1 - document; document before the chunk)."""
        C = document_2C.shape[1]
        rows_2C = document_2C.astype(jnp.float32)  # f32 transposes; document numbers are < 2^24
        code_CC = column(rows_2C[None, :1])[0]
        col_CC = jnp.where(code_CC < 0, -1 - code_CC, code_CC)
        row_1C = jnp.where(rows_2C[:1] < 0, -1 - rows_2C[:1], rows_2C[:1])
        before_11, last_11 = rows_2C[1:, :1], row_1C[:, -1:]
        same_CC = col_CC == row_1C
        return cls(
            same_CC=same_CC,
            earlier_CC=same_CC & (iota((C, C), 0) > iota((C, C), 1)),
            live_C1=code_CC[:, :1] >= 0,
            reads_C1=col_CC[:, :1] == before_11,
            writes_C1=col_CC[:, :1] == last_11,
            keeps_11=last_11 == before_11,
        )


class Decays(NamedTuple):
    """Factors of exp(G_i - G_j) for one chunk (see the top of the file)."""

    tile_HaK: jax.Array  # the sum of a tile's g, where all of it is one document
    query_HCK: jax.Array  # exp(P_i) * QUERY_SCALE
    own_HCK: jax.Array  # exp(-P_j) * KEY_SCALE
    key_HCK: jax.Array  # exp(P at the tile's end - P_j), at most 1
    start_HCK: jax.Array  # exp(G_i): since the chunk began
    rest_HCK: jax.Array  # exp(G_C - G_j): until the chunk ends
    whole_H1K: jax.Array  # exp(G_C)

    @classmethod
    def open(cls, g_HCK: jax.Array, masks: Masks, dtype) -> "Decays":
        C = g_HCK.shape[1]
        row_CC, col_CC = iota((C, C), 0), iota((C, C), 1)
        within_CC = masks.same_CC & (row_CC // TILE == col_CC // TILE) & (row_CC >= col_CC)
        P_HCK = sum_rows(within_CC, g_HCK, dtype)
        tile_HaK = jnp.concatenate([x[:, -1:] for _, x in tiles_of(P_HCK)], 1)
        since, until = _running_sums(tile_HaK), _running_sums(tile_HaK, backwards=True)
        grow_HCK = jnp.exp(P_HCK)
        key_HCK = jnp.exp(jnp.minimum(spread(tile_HaK, C) - P_HCK, 0.0))
        return cls(
            tile_HaK=tile_HaK,
            query_HCK=grow_HCK * QUERY_SCALE,
            own_HCK=jnp.exp(-P_HCK) * KEY_SCALE,
            key_HCK=key_HCK,
            start_HCK=grow_HCK * spread(jnp.exp(since), C),
            rest_HCK=key_HCK * spread(jnp.exp(until), C),
            whole_H1K=jnp.exp(since[:, -1:] + tile_HaK[:, -1:]),
        )

    def between(self, a: int) -> jax.Array:
        """exp of the sum of the tiles after b and before a, for each b < a, times KEY_SCALE:
        [H, a, K]. Tile by tile, as a difference of running sums would let other documents in."""
        steps = [jnp.zeros_like(self.tile_HaK[:, :1])]
        for c in range(a - 1, 0, -1):
            steps.insert(0, steps[0] + self.tile_HaK[:, c : c + 1])
        return jnp.exp(jnp.concatenate(steps, 1)) * KEY_SCALE

    def keys(self, own_HCK, key_HCK, a: int):
        """The keys up to the end of tile a as its queries see them: [H, 16 (a + 1), K]."""
        own_HiK = own_HCK[:, a * TILE : (a + 1) * TILE]
        if a == 0:
            return own_HiK
        seen_HjK = key_HCK[:, : a * TILE] * spread(self.between(a), a * TILE)
        return jnp.concatenate([seen_HjK, own_HiK], 1)


def _running_sums(x_HaK, *, backwards: bool = False):
    """For each tile the sum of those before it, or after it."""
    tiles = range(x_HaK.shape[1])
    sums = [jnp.zeros_like(x_HaK[:, :1])]
    for a in list(tiles)[:0:-1] if backwards else list(tiles)[:-1]:
        sums.append(sums[-1] + x_HaK[:, a : a + 1])
    return jnp.concatenate(sums[::-1] if backwards else sums, 1)


def tiles_of(*arrays_HCK):
    """Yields (tile number a, the rows of tile a of all arrays one above the other)."""
    for a in range(arrays_HCK[0].shape[1] // TILE):
        yield a, jnp.concatenate([x[:, a * TILE : (a + 1) * TILE] for x in arrays_HCK], 1)


def scores(queries_HCK, own_HCK, key_HCK, decays: Decays, dtype):
    """sum_K x_i k_j exp(G_i - G_j) of each x in `queries_HCK` (already times `query_HCK`).

    Returns one [H, C, C] for each; entries above the diagonal tiles are 0, those in the upper half
    of a diagonal tile are finite garbage.
    """
    C, rows = own_HCK.shape[1], []
    for a, x_HiK in tiles_of(*queries_HCK):
        s_Hij = einsum("HiK,HjK->Hij", x_HiK, decays.keys(own_HCK, key_HCK, a), dtype)
        s_HiC = jnp.pad(s_Hij, ((0, 0), (0, 0), (0, C - s_Hij.shape[2])))
        rows.append(jnp.split(s_HiC, len(queries_HCK), axis=1))
    return [jnp.concatenate(r, 1) for r in zip(*rows, strict=True)]


def unit_lower_inverse(A_HCC, dtype):
    """(I + A)^-1 of strictly lower triangular A.

    Tiles of 16 by forward substitution in f32 on the vector unit, all tiles of a head side by side
    in the lanes; then the block ladder X - X L X on the matrix unit (see triangular.py).
    """
    C = A_HCC.shape[1]
    X_HiC = _tile_inverses(A_HCC)
    in_tile_CC = iota((C, C), 0) // TILE == iota((C, C), 1) // TILE
    X_HCC = jnp.where(in_tile_CC, jnp.concatenate([X_HiC] * (C // TILE), 1), 0.0)
    size = TILE
    while size < C:
        X_HCC = _next_rung(X_HCC, A_HCC, size, dtype)
        size *= 2
    return X_HCC


def _next_rung(X_HCC, A_HCC, size: int, dtype):
    """Inverses of the diagonal blocks of `size` -> of those twice the size: X - X L X, of which
    only the lower half of each block, the rows r, is not X."""
    H, C, _ = X_HCC.shape
    lower = [slice(n, n + size) for n in range(size, C, 2 * size)]
    lane_HrC = iota((H, size, C), 2)
    L = [jnp.where(lane_HrC // size == s.start // size - 1, A_HCC[:, s], 0.0) for s in lower]
    LX_HrC = einsum("HrD,HDC->HrC", jnp.concatenate(L, 1), X_HCC, dtype, split="xy")
    zero_HrC = jnp.zeros_like(lane_HrC, jnp.float32)
    LX = [y for part in jnp.split(LX_HrC, len(lower), 1) for y in (zero_HrC, part)]
    X_HrD = jnp.concatenate([X_HCC[:, s] for s in lower], 1)
    XLX_HrC = einsum("HrD,HDC->HrC", X_HrD, jnp.concatenate(LX, 1), dtype, split="xy")
    rows = []
    for s, part in zip(lower, jnp.split(XLX_HrC, len(lower), 1), strict=True):
        rows += [X_HCC[:, s.start - size : s.start], X_HCC[:, s] - part]
    return jnp.concatenate(rows, 1)


def _tile_inverses(A_HCC):
    """The inverses of the diagonal tiles of I + A, tile a in the lanes 16 a to 16 a + 15."""
    H, C, _ = A_HCC.shape
    lane_HiC = iota((H, TILE, C), 2)
    A_HiC = jnp.zeros((H, TILE, C), jnp.float32)
    for a, tile_HiC in tiles_of(A_HCC):
        A_HiC = jnp.where(lane_HiC // TILE == a, tile_HiC, A_HiC)
    X_HiC = (iota((H, TILE, C), 1) == lane_HiC % TILE).astype(jnp.float32)
    flat_rC = A_HiC.reshape(H * TILE, C)  # one row axis: the lane gather takes two dimensions
    first_rC = lane_HiC.reshape(H * TILE, C) // TILE * TILE
    for m in range(TILE - 1):  # row m is done; A is 0 in the rows up to it
        A_m_HiC = jnp.take_along_axis(flat_rC, first_rC + m, axis=1).reshape(H, TILE, C)
        X_HiC = X_HiC - A_m_HiC * X_HiC[:, m : m + 1]
    return X_HiC
