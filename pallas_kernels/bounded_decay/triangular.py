"""(I + A)^-1 for a strictly lower triangular A, as chunked.py's delta rule needs it.

By the block ladder: with X the inverse of the block-diagonal part of I + A and L the blocks of A
that couple neighbouring pairs, X - X L X is the inverse for blocks twice the size. Powers of A are
never formed: for keys that point the same way they reach 1e9 while the inverse stays within 1, so
I - A + A^2 - ... is wrong by 1.0 at C = 32.
"""

import jax
import jax.numpy as jnp
import numpy as np

_LADDER = 16  # up to here whole matrices; above, half the products would multiply zeros


@jax.custom_jvp
def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 of A [...,C,C], C a power of two; entries on or above the diagonal must be 0."""
    C = A.shape[-1]
    if C <= _LADDER:
        return _ladder(A)
    h = C // 2
    halves = unit_lower_inverse(jnp.stack([A[..., :h, :h], A[..., h:, h:]], -3))
    upper, lower = halves[..., 0, :, :], halves[..., 1, :, :]
    corner = -_matmul(_matmul(lower, A[..., h:, :h]), upper)
    return jnp.block([[upper, jnp.zeros_like(upper)], [corner, lower]])


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    # Two products with the inverse at hand, instead of differentiating every rung.
    X = unit_lower_inverse(*primals)
    return X, -_matmul(_matmul(X, tangents[0]), X)


def _ladder(A):
    C = A.shape[-1]
    row, col = np.indices((C, C))
    X = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
    size = 1
    while size < C:
        couples = (row // size != col // size) & (row // (2 * size) == col // (2 * size))
        L = jnp.where(np.broadcast_to(couples, A.shape), A, 0.0)
        X = X - (_matmul(_matmul(X, L), X) if size > 1 else L)
        size *= 2
    return X


def _matmul(x, y):
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
