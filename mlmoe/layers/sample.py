"""A sample of what a recurrence was fed and what came out, for comparison with float64.

Columns of a state are independent in V, so one head and a few value channels are checked exactly by
a recurrence over those alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COLLECTION = "recurrence"  # the flax collection in which layers leave a Sample when asked for it
CHANNELS = 4  # of the value
TOKENS = 1024  # at which the decays of all heads are read


class Sample(NamedTuple):
    """One row and its last head, the one with the longest memory at birth; c: sampled channels."""

    document_T: jax.Array
    inputs: tuple[jax.Array, ...]  # of the op, in its order: q, k [T, K], v [T, c], ...
    o_Tc: jax.Array
    state: Any  # at the row's end: [K, c]; slots: [M, K] and [M, c]
    g_NHK: jax.Array  # decays of all heads at the tokens `evenly` names


def evenly(T: int) -> np.ndarray:
    """The tokens, TOKENS of them at most, at which decays are read."""
    return np.unique(np.linspace(0, T - 1, min(T, TOKENS)).astype(np.int32))


def take_sample(
    document_BT: jax.Array,
    inputs: tuple[jax.Array, ...],
    g_BTHK: jax.Array,
    o_BTHV: jax.Array,
    state: Any,
) -> Sample:
    """Of the row whose last document is longest: the state at its end has the most to lose."""
    last_B1 = jnp.maximum(jnp.max(document_BT, 1, keepdims=True), 1)
    row = jnp.argmax(jnp.sum(document_BT == last_B1, 1))

    def one(x: jax.Array) -> jax.Array:
        return jnp.take(x, row, axis=0)

    q, k, v, *rest = (one(x)[:, -1] for x in inputs)
    if isinstance(state, tuple):
        state = one(state[0])[-1], one(state[1])[-1, :, :CHANNELS]
    else:
        state = one(state)[-1, :, :CHANNELS]
    return Sample(
        document_T=one(document_BT),
        inputs=(q, k, v[:, :CHANNELS], *rest),
        o_Tc=one(o_BTHV)[:, -1, :CHANNELS],
        state=state,
        g_NHK=one(g_BTHK)[evenly(g_BTHK.shape[1])],
    )
