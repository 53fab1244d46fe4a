"""The public TPU kernel for the same recurrence, to measure beside ours: tokamax's
`kimi_delta_attention` (>= 0.0.17, Python 3.12 or newer). Nothing else here uses it."""

import importlib.util

import jax


def tokamax_found() -> bool:
    """Whether a tokamax that has the kernel is installed."""
    if importlib.util.find_spec("tokamax") is None:
        return False
    from importlib.metadata import version

    return tuple(int(n) for n in version("tokamax").split(".")[:3]) >= (0, 0, 17)


def tokamax_forward(
    q_BHTK: jax.Array, k_BHTK: jax.Array, v_BHTV: jax.Array, g_BHTK: jax.Array, beta_BHT: jax.Array
) -> jax.Array:
    """o [B, H, T, V] by tokamax's Mosaic kernel, with the same bound on the decay."""
    import tokamax
    from tokamax.ops import kimi_delta_attention

    head_first = (x.swapaxes(0, 1) for x in (q_BHTK, k_BHTK, v_BHTV, g_BHTK, beta_BHT))
    with tokamax.config.cross_compile(True):
        o_HBTV = kimi_delta_attention(*head_first, lower_bound=-5.0, implementation="mosaic")[0]
    return o_HBTV.swapaxes(0, 1)
