"""Which document a token belongs to, for everything that crosses time."""

import jax
import jax.numpy as jnp


def document_ids(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: 0 at padding, else 1, 2, ... in order of appearance in the row.

    A change of segment id starts a new document, also back to an id seen before (1, 2, 1 are three
    documents); padding inside a document does not end it (1, 0, 1 is one).
    """
    live_BT = segment_ids_BT != 0
    T = segment_ids_BT.shape[1]
    index_BT = jnp.where(live_BT, jnp.arange(T)[None], -1)
    last_BT = jax.lax.cummax(index_BT, axis=1)  # the latest live token, t included
    before_BT = jnp.pad(last_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    id_before_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(before_BT, 0), axis=1)
    starts_BT = live_BT & ((before_BT < 0) | (segment_ids_BT != id_before_BT))
    return jnp.where(live_BT, jnp.cumsum(starts_BT.astype(jnp.int32), axis=1), 0)
