"""Bounded-decay recurrence, C tokens at a time: plain jnp, any backend, the same values as ref.py.

With G the running sum of g inside the chunk, i and j its tokens and S the state that enters it:

    A_kk[i,j] = beta_i sum_d k_i[d] k_j[d] exp(G_i[d]-G_j[d])  (i>j);  A_qk likewise with q  (i>=j)
    new = (I + A_kk)^-1 diag(beta) (v - (exp(G) k) S)          (additive rule: new = v)
    o   = scale ((exp(G) q) S + A_qk new);   S' = diag(exp(G_C)) S + (exp(G_C - G) k)^T new

One chunk is one scan step, recomputed in the backward pass. Doing the intra-chunk work of all
chunks before the scan was measured too (B=16, T=256, H=4, K=V=32, f32, two cores, forward and
backward): 67 ms and 50 MB against 41 ms and 16 MB, since a step's arrays stay in cache.
op.py calls this with padding folded in and documents numbered.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.ref import einsum
from pallas_kernels.bounded_decay.tiles import Chunk, chunk_size, join_chunks, split_chunks
from pallas_kernels.bounded_decay.triangular import unit_lower_inverse


def bounded_decay_chunked(q, k, v, g, beta, initial_state, document, scale):
    """o [B,T,H,V] (v's dtype) and the final state [B,H,K,V] f32.

    q, k, g [B,T,H,K]; v [B,T,H,V]; beta [B,T,H], None for the additive rule; initial_state
    [B,H,K,V] f32; document [B,T] int32, never decreasing, 0 for what continues initial_state.
    """
    T, K = q.shape[1], q.shape[-1]
    beta = None if beta is None else beta[..., None]
    xs = split_chunks((q, k, v, g, beta), document, chunk_size(K))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(S_BHKV, x):
        inputs, document_BC, before_B = x
        q, k, new, g, beta = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
        at = Chunk.open(g, document_BC, before_B)
        if beta is not None:
            A_kk = beta * at.scores(k, k)
            new = beta * (new - at.read_state(k, S_BHKV))
            new = einsum("BHij,BHjV->BHiV", unit_lower_inverse(A_kk), new)
        o_BHCV = scale * at.read(q, k, new, S_BHKV)
        return at.end_state(S_BHKV, k, new), o_BHCV.astype(v.dtype)

    S_BHKV, o_NBHCV = jax.lax.scan(step, initial_state, xs)
    return join_chunks(o_NBHCV, T), S_BHKV
