"""Slot attention, C tokens at a time: a softmax read-out over M decaying slots.

    Ks = exp(g) Ks + s k^T  [M,K];   Vs = exp(g) Vs + s v^T  [M,V];   o = Vs^T softmax_M(scale Ks q)

Both states are the additive bounded-decay recurrence with write key s and the decay on the slot
axis: the first pass reads across the slots (decay on the output side), the second is the ordinary
read-out with the softmax as its query. Both passes share one chunk, so the [T,M] softmax exists
one chunk at a time. ref.py holds the token-by-token definition; op.py the public function.
Source: gated slot attention (arXiv 2409.07146), slots not yet written are not masked.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.tiles import Chunk, chunk_size, join_chunks, split_chunks


def slot_attention_chunked(q, k, v, s, g, initial_state, document, scale):
    """o [B,T,H,V] (v's dtype) and the final (key slots [B,H,M,K], value slots [B,H,M,V]) f32.

    q, k [B,T,H,K]; v [B,T,H,V]; s, g [B,T,H,M]; initial_state a pair like the final one;
    document [B,T] as in chunked.py.
    """
    T, M = q.shape[1], s.shape[-1]
    xs = split_chunks((q, k, v, s, g), document, chunk_size(M))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(states, x):
        k_slots_BHMK, v_slots_BHMV = states
        inputs, document_BC, before_B = jax.tree.map(lambda a: a[0], x)  # groups of one chunk
        q, k, values, s, g = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
        at = Chunk.open(g, document_BC, before_B)
        p_BHCM = jax.nn.softmax(scale * at.read_across(q, s, k, k_slots_BHMK))
        o_BHCV = at.read(p_BHCM, s, values, v_slots_BHMV)
        states = at.end_state(k_slots_BHMK, s, k), at.end_state(v_slots_BHMV, s, values)
        return states, o_BHCV.astype(v.dtype)

    states, o_NBHCV = jax.lax.scan(step, initial_state, xs)
    return join_chunks(o_NBHCV[:, None], T), states
