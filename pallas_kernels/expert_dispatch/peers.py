"""Grouped products of public libraries, to measure beside ours; nothing else here uses them.

Each class has `dot` and `pullback` as `grouped` has them, so that `sorted.expert_ffn` runs on it:
the same order, gathers and combination, with the activation apart in XLA.
"""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp


class Megablox:
    """jax's own kernels, `gmm` and `tgmm`.

    Tiles by libtpu 0.0.42's schedule for v5p at full scale. gmm at 512/1024/1024 reaches 94 % of
    the matrix units' rate, but works on 44 tiles of 512 rows where 32 would hold the rows; 140 of
    128 are 9 % too many, and with all of K in one block they run at full rate. tgmm is best at 512
    rows: 9,122 bundles a step, against 5,118 for half the work at 256.
    """

    GMM_ROWS, TGMM_ROWS = 128, 512

    @classmethod
    def dot(cls, x_MK, w_EPKF, counts_E):
        return tuple(
            _owned(cls._gmm(x_MK, w_EPKF, p, counts_E), counts_E) for p in range(w_EPKF.shape[1])
        )

    @classmethod
    def pullback(cls, x_MK, w_EPKF, counts_E, dy):
        dx = [cls._gmm(dy_MF, w_EPKF, p, counts_E, transposed=True) for p, dy_MF in enumerate(dy)]
        dx_MK = jnp.stack(dx).astype(jnp.float32).sum(axis=0).astype(x_MK.dtype)
        dw = [cls._tgmm(x_MK, dy_MF, counts_E) for dy_MF in dy]
        return _owned(dx_MK, counts_E), jnp.stack(dw, axis=1)

    @classmethod
    def _gmm(cls, x_MK, w_EPKF, p, counts_E, transposed=False):
        """The product with projection p. Projections are groups too, the others empty: a slice of
        the matrices would be a copy of all of them."""
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        E, P, *matrix = w_EPKF.shape
        counts_EP = jnp.zeros((E, P), jnp.int32).at[:, p].set(counts_E)
        K, n = x_MK.shape[1], matrix[0 if transposed else 1]
        # The kernel has 16 MiB for two of each block: K x 512 at K = 3584, or K x 896 at 3072.
        tn = next(d for d in (896, 768, 512, 256, 128) if n % d == 0 and K * d < 3 << 20)
        tiles, w_GKF = (cls.GMM_ROWS, K, tn), w_EPKF.reshape(E * P, *matrix)
        sizes_G = counts_EP.reshape(-1)
        return gmm(x_MK, w_GKF, sizes_G, x_MK.dtype, tiles, transpose_rhs=transposed)

    @classmethod
    def _tgmm(cls, x_MK, dy_MF, counts_E):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        sizes = x_MK.shape[1], dy_MF.shape[1]
        tk, tf = (next(d for d in (1024, 896, 512, 128) if n % d == 0) for n in sizes)
        return tgmm(x_MK.T, dy_MF, counts_E, x_MK.dtype, (cls.TGMM_ROWS, tk, tf))


class Tokamax:
    """`tokamax.ragged_dot` (>= 0.0.17, Python 3.12 or newer) with the tiles that it chooses."""

    ROWS = WIDTH = 128  # of its tiles where it has no others on file, as for these shapes

    @staticmethod
    def dot(x_MK, w_EPKF, counts_E):
        import tokamax

        with tokamax.config.cross_compile(True):
            run = partial(tokamax.ragged_dot, x_MK, group_sizes=counts_E, implementation="mosaic")
            return tuple(_owned(run(w_EPKF[:, p]), counts_E) for p in range(w_EPKF.shape[1]))

    @classmethod
    def pullback(cls, x_MK, w_EPKF, counts_E, dy):
        import tokamax

        with tokamax.config.cross_compile(True):
            return jax.vjp(lambda x, w: cls.dot(x, w, counts_E), x_MK, w_EPKF)[1](dy)


def tokamax_found() -> bool:
    """Whether tokamax is installed."""
    return importlib.util.find_spec("tokamax") is not None


def _owned(y_MF, counts_E):
    """0 in the rows that no group owns: the kernels leave them unwritten."""
    return jnp.where(jnp.arange(y_MF.shape[0])[:, None] < counts_E.sum(), y_MF, 0)
