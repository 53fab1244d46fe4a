"""Gated activations of the feed-forward layers: dense, shared and routed experts all call `glu`.

    four     sigmoid(z) * tanh(z2) * u                                   parts (z, z2, u)
    capped   b1 tanh(z / b1) sigmoid(z) * b2 tanh(u / b2)                parts (z, u)
    swiglu   z sigmoid(z) * u                                            parts (z, u)

Each part is its own projection of the layer's input. `four` (two projections in the gate, hence
four matrices with the output) is the source articles' SiTU-GLU; `capped` is that of arXiv
2607.24653: the same z feeds tanh and sigmoid, so near 0 it equals SwiGLU to first order, and its
size never exceeds b1 b2 = 100.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

PARTS: dict[str, int] = {"four": 3, "capped": 2, "swiglu": 2}

GATE_CAP = 4.0  # b1
UP_CAP = 25.0  # b2


def parts(activation: str) -> int:
    """The number P of projections that `activation` multiplies. ValueError: an unknown name."""
    if not isinstance(activation, str) or activation not in PARTS:
        raise ValueError(f"activation is {activation!r}; the choices are {', '.join(PARTS)}")
    return PARTS[activation]


def glu(hidden: jax.Array | Sequence[jax.Array], activation: str) -> jax.Array:
    """The product of the parts under `activation` (equations above).

    Args:
      hidden: [P, ..., F] or P arrays [..., F], in the order of the table; any float dtype.
      activation: `four` (P = 3), `capped` or `swiglu` (P = 2).

    Returns:
      [..., F] in the dtype of the parts. The arithmetic is f32 and rounds once, at the end.

    Raises:
      ValueError: an unknown activation, or a number of parts other than P.
    """
    if len(hidden) != parts(activation):
        raise ValueError(
            f"activation {activation!r} needs {parts(activation)} projections, got {len(hidden)}"
        )
    z, *middle, u = (part.astype(jnp.float32) for part in hidden)
    match activation:
        case "four":
            y = jax.nn.sigmoid(z) * jnp.tanh(middle[0]) * u
        case "capped":
            gate = GATE_CAP * jnp.tanh(z / GATE_CAP) * jax.nn.sigmoid(z)
            y = gate * UP_CAP * jnp.tanh(u / UP_CAP)
        case "swiglu":
            y = jax.nn.silu(z) * u
    return y.astype(hidden[0].dtype)
