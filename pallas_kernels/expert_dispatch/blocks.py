"""Block sizes of the kernels: what fits a core's memory, reads HBM least and keeps two cores busy.

libtpu 0.0.42 on a v5p, in ms by its schedule: 14 experts of 1,170 rows, R = 3584, F = 3072, P = 3,
bf16; and the block of columns chosen there, with what it makes the kernel read and write:

    rows of a tile      256     128         columns                    GB
    glu                 2.58    2.58        768                        1.5
    glu_grad            0.86    0.87        1536 (1024: 1.15 ms)       1.4
    outer, dw_in        2.58    2.70        1792 x 768 of R x F        2.1
    outer, dw_out       0.86                1536 x 1792 of F x R       0.8
    product, h w_out    0.86                1792                       0.7
    product, dx         2.58                896                        2.4

2.58 and 0.86 are what the matrix units take for 1,280 rows an expert. Blocks of 1024 cut F in
three, and two cores share three unevenly.
"""

import jax.numpy as jnp

# Tiles of 128 rows would fill 64 rows an expert less on average, but a step of the widest kernels
# would be shorter than the copy of the next expert's matrices (11 MB, 8 us at half a chip's
# bandwidth against 6 us of products).
ROWS = 256
LANES = 128  # the widths of blocks are multiples of this
# Bytes of VMEM that blocks may take, two of each and the f32 sums. The kernels' limit is 60 MiB;
# spilled registers take up to 11 more, and wider blocks take much longer to compile.
VMEM = 44 << 20


def tile_rows(pairs: int, experts: int, dtype: jnp.dtype) -> int:
    """Rows of a tile: an eighth to a quarter of an expert's mean share, a power of 2 up to ROWS.

    At least 16 (f32: 8), which is what a register holds in its second dimension.
    """
    least = 32 // jnp.dtype(dtype).itemsize
    return max(least, min(ROWS, 1 << max(0, (pairs // experts // 4).bit_length() - 1)))


def columns(width: int, size: int, *, fixed: int, per_column: int, sums: int) -> int:
    """The widest block of a kernel whose other blocks keep their shape.

    Args:
      width: columns in all, a multiple of LANES.
      size: bytes of an element.
      fixed, per_column: elements in VMEM, in all and for each column.
      sums: f32 values besides, for each column.

    Raises:
      ValueError: not even LANES columns fit.
    """

    def vmem(n: int) -> int:
        return 2 * size * (fixed + per_column * n) + 4 * sums * n

    for n in _widths(width):
        if vmem(n) <= VMEM:
            return n
    raise ValueError(_too_large(width, vmem(LANES)))


def corner(K: int, F: int, P: int, tm: int, size: int) -> tuple[int, int]:
    """Block (tk, tf) of a gradient [P, K, F]: of those that fit, the one that reads least.

    Raises:
      ValueError: not even LANES x LANES fit.
    """

    def vmem(tk: int, tf: int) -> int:
        return 2 * size * (tm * tk + P * tm * tf + P * tk * tf) + 4 * P * tk * tf

    fit = [(tk, tf) for tk in _widths(K) for tf in _widths(F) if vmem(tk, tf) <= VMEM]
    if not fit:
        raise ValueError(_too_large(F, vmem(LANES, LANES)))
    even = [(tk, tf) for tk, tf in fit if F // tf % 2 == 0] or fit
    # x is read once for each block of columns, the P cotangents once for each block of rows.
    return min(even, key=lambda block: 1 / block[1] + P / block[0])


def _widths(width: int) -> list[int]:
    """What divides `width`, widest first, but after all that cut it in two for two cores."""
    n = width // LANES
    found = [LANES * d for d in range(n, 0, -1) if n % d == 0]
    return sorted(found, key=lambda block: width // block % 2)


def _too_large(width: int, vmem: int) -> str:
    return (
        f"expert_ffn: blocks of {LANES} of {width} columns take {vmem >> 20} MiB of a core's "
        f"memory, more than {VMEM >> 20}; implementation='sorted' has no such limit"
    )
