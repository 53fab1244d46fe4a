"""Matrix products over consecutive groups of rows, each group with its own matrix.

    dot       y^p_m = x_m w_{e(m), p}                       for p = 0 .. P-1
    pullback  dx_m = sum_p dy^p_m w_{e(m), p}^T,   dw_{e, p} = sum_{m in group e} x_m^T dy^p_m

Group e is the next counts_e rows; rows after the last group give 0. The compiler's `ragged_dot` is
the whole story where it is native (TPU). XLA:CPU expands it to all E matrices times all rows, 10 to
40 times slower forward and backward at E = 16 to 32; there a loop walks over blocks of rows, each
inside one group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Beyond 64 rows a block gains nothing on a CPU; its idle rows cost more and more.
MAX_BLOCK = 64

_matmul = partial(jnp.matmul, preferred_element_type=jnp.float32)


def dot(x_MK: jax.Array, w_EPKF: jax.Array, counts_E: jax.Array) -> tuple[jax.Array, ...]:
    """P products [M, F] in x's dtype; see above. counts_E int32, its sum at most M."""
    return jax.lax.platform_dependent(x_MK, w_EPKF, counts_E, cpu=_block_dot, default=_ragged_dot)


def pullback(
    x_MK: jax.Array, w_EPKF: jax.Array, counts_E: jax.Array, dy: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """(dx_MK, dw_EPKF) for the cotangents `dy` of `dot`, P arrays [M, F]; the dtypes of x and w."""
    return jax.lax.platform_dependent(
        x_MK, w_EPKF, counts_E, dy, cpu=_block_pullback, default=_ragged_pullback
    )


def _ragged_dot(x_MK, w_EPKF, counts_E):
    # What a native kernel leaves in the rows that no group owns is not promised to be 0, or finite.
    owned_M1 = jnp.arange(x_MK.shape[0])[:, None] < counts_E.sum()
    return tuple(
        jnp.where(owned_M1, jax.lax.ragged_dot(x_MK, w_EPKF[:, p], counts_E), 0)
        for p in range(w_EPKF.shape[1])
    )


def _ragged_pullback(x_MK, w_EPKF, counts_E, dy):
    _, pull = jax.vjp(lambda x_MK, w_EPKF: _ragged_dot(x_MK, w_EPKF, counts_E), x_MK, w_EPKF)
    return pull(dy)


class _Blocks(NamedTuple):
    """Blocks of `size` rows, none across two groups; only the first `used` of the B exist."""

    size: int
    group_B: jax.Array
    first_B: jax.Array  # rows first .. last - 1 are the block's own
    last_B: jax.Array
    window_B: jax.Array  # the `size` rows from here hold them and stay inside the array
    used: jax.Array

    def mask(self, b: jax.Array) -> jax.Array:
        """[size, 1]: which rows of block b's window are its own."""
        row_C1 = self.window_B[b] + jnp.arange(self.size)[:, None]
        return (row_C1 >= self.first_B[b]) & (row_C1 < self.last_B[b])

    def read(self, rows_MK: jax.Array, b: jax.Array) -> jax.Array:
        """Block b's own rows, 0 in the rest of its window."""
        rows_CK = jax.lax.dynamic_slice_in_dim(rows_MK, self.window_B[b], self.size)
        return jnp.where(self.mask(b), rows_CK, 0)

    def write(self, rows_MK: jax.Array, b: jax.Array, new_CK: jax.Array) -> jax.Array:
        """`rows_MK` with block b's own rows replaced."""
        old_CK = jax.lax.dynamic_slice_in_dim(rows_MK, self.window_B[b], self.size)
        rows_CK = jnp.where(self.mask(b), new_CK.astype(rows_MK.dtype), old_CK)
        return jax.lax.dynamic_update_slice_in_dim(rows_MK, rows_CK, self.window_B[b], 0)


def _blocks(counts_E: jax.Array, rows: int) -> _Blocks:
    """Cuts the groups into blocks of the mean group's length, rounded up to 8, 16, 32 or 64."""
    groups = counts_E.shape[0]
    size = min(MAX_BLOCK, rows, max(8, 1 << (rows // groups - 1).bit_length()))
    blocks_E = -(-counts_E // size)
    end_E = jnp.cumsum(blocks_E)
    # At most: every row in a block of its own group, and size - 1 idle rows in each group.
    b_B = jnp.arange(min(rows, (rows + groups * (size - 1)) // size))
    group_B = jnp.sum(b_B[:, None] >= end_E[None, :], axis=1).clip(max=groups - 1)
    stop_B = jnp.cumsum(counts_E)[group_B]
    first_B = stop_B - counts_E[group_B] + size * (b_B - (end_E - blocks_E)[group_B])
    last_B = jnp.minimum(first_B + size, stop_B)
    return _Blocks(size, group_B, first_B, last_B, first_B.clip(0, rows - size), end_E[-1])


def _block_dot(x_MK, w_EPKF, counts_E):
    blocks = _blocks(counts_E, x_MK.shape[0])

    def body(b, y):
        x_CK, w_PKF = blocks.read(x_MK, b), w_EPKF[blocks.group_B[b]]
        return tuple(blocks.write(y_MF, b, _matmul(x_CK, w_PKF[p])) for p, y_MF in enumerate(y))

    # `zeros_like`, so that inside shard_map the zeros vary over the mesh axes that x varies over.
    zeros_MF = jnp.zeros_like(x_MK, shape=(x_MK.shape[0], w_EPKF.shape[3]))
    return jax.lax.fori_loop(0, blocks.used, body, (zeros_MF,) * w_EPKF.shape[1])


def _block_pullback(x_MK, w_EPKF, counts_E, dy):
    blocks = _blocks(counts_E, x_MK.shape[0])

    def body(b, carry):
        dx_MK, dw_EPKF = carry
        e = blocks.group_B[b]
        x_CK = blocks.read(x_MK, b)
        dy_CFs = [blocks.read(dy_MF, b) for dy_MF in dy]
        # P plain products: XLA:CPU takes 1.2 to 1.5 times longer over one batched over P.
        dx_CKs = [_matmul(dy_CF, w_EPKF[e, p].T) for p, dy_CF in enumerate(dy_CFs)]
        dx_CK = jnp.stack(dx_CKs).sum(axis=0)
        dw_PKF = jnp.stack([_matmul(x_CK.T, dy_CF) for dy_CF in dy_CFs])
        return blocks.write(dx_MK, b, dx_CK), dw_EPKF.at[e].add(dw_PKF)

    # f32: a long group adds hundreds of blocks into one gradient.
    init = jnp.zeros_like(x_MK), jnp.zeros_like(x_MK, jnp.float32, w_EPKF.shape)
    dx_MK, dw_EPKF = jax.lax.fori_loop(0, blocks.used, body, init)
    return dx_MK, dw_EPKF.astype(w_EPKF.dtype)
