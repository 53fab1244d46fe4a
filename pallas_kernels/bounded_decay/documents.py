"""Which document each token of a packed row belongs to, for everything that crosses time."""

import jax
import jax.numpy as jnp


def number_documents(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: 0, 1, 2, ... in order of appearance along each row, never decreasing.

    A change of segment id starts a new document, also back to an id seen before (1, 2, 1 are three
    documents). Padding (0) takes the document before it, or the row's first where none came before,
    so it never ends one (1, 0, 1 is a single document).
    """
    real_BT = segment_ids_BT != 0
    time_T = jnp.arange(real_BT.shape[1])
    last_real_BT = jax.lax.cummax(jnp.where(real_BT, time_T[None], -1), axis=1)
    first_real_B = jnp.argmax(real_BT, axis=1)
    source_BT = jnp.where(last_real_BT < 0, first_real_B[:, None], last_real_BT)
    held_BT = jnp.take_along_axis(segment_ids_BT, source_BT, axis=1)
    changed_BT = held_BT != jnp.roll(held_BT, 1, axis=1)
    return jnp.cumsum(changed_BT.at[:, 0].set(False), axis=1, dtype=jnp.int32)


def document_ids(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: 0 at padding, else 1 + `number_documents`. Raises ValueError for other ids."""
    shape = getattr(segment_ids_BT, "shape", None)
    if shape is None or len(shape) != 2 or shape[1] == 0 or segment_ids_BT.dtype != jnp.int32:
        found = "" if shape is None else f" {segment_ids_BT.dtype} {shape}"
        kind = type(segment_ids_BT).__name__
        raise ValueError(f"document_ids: segment_ids is a {kind}{found}; expected int32 [B,T]")
    return jnp.where(segment_ids_BT != 0, number_documents(segment_ids_BT) + 1, 0)
