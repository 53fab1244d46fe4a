"""Bounded-decay recurrence, C tokens at a time: plain jnp, any backend, the same values as ref.py.

With G the running sum of g inside the chunk, i and j its tokens and S the state that enters it:

    A_kk[i,j] = beta_i sum_d k_i[d] k_j[d] exp(G_i[d]-G_j[d])  (i>j);  A_qk likewise with q  (i>=j)
    new = U - W S,  U = (I + A_kk)^-1 beta v,  W = (I + A_kk)^-1 beta exp(G) k   (additive: new = v)
    o   = scale ((exp(G) q) S + A_qk new);   S' = diag(exp(G_C)) S + (exp(G_C - G) k)^T new

All but new and S' is done for a group of chunks at once, and only those two chunk by chunk; a group
is recomputed in the backward pass. Groups keep an operation's arrays at a size that fills the
machine: 8k:tiny's step took 138 ms one chunk at a time and 123 ms in groups of 64 (two CPU cores),
and B=1, T=4096, H=4, K=V=64 with gradient 144 and 114 ms. op.py calls this with padding folded in
and documents numbered.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.ref import einsum
from pallas_kernels.bounded_decay.tiles import Chunk, chunk_size, join_chunks, split_chunks
from pallas_kernels.bounded_decay.triangular import unit_lower_inverse

GROUP = 64  # heads x rows x chunks of one group


def bounded_decay_chunked(q, k, v, g, beta, initial_state, document, scale):
    """o [B,T,H,V] (v's dtype) and the final state [B,H,K,V] f32.

    q, k, g [B,T,H,K]; v [B,T,H,V]; beta [B,T,H], None for the additive rule; initial_state
    [B,H,K,V] f32; document [B,T] int32, never decreasing, 0 for what continues initial_state.
    """
    B, T, H, K = q.shape
    beta = None if beta is None else beta[..., None]
    C = chunk_size(K)
    group = max(1, min(-(-T // C), GROUP // (B * H)))
    xs = split_chunks((q, k, v, g, beta), document, C, group)

    def inside(inputs, document_BC, before_B):
        """What a chunk computes without the state."""
        q, k, v, g, beta = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
        at = Chunk.open(g, document_BC, before_B)
        new, W = v, None
        if beta is not None:
            X = unit_lower_inverse(beta * at.scores(k, k))
            new = einsum("BHij,BHjV->BHiV", X, beta * v)
            W = einsum("BHij,BHjK->BHiK", X, beta * at.from_state(k))
        # A token reads its own write undecayed. Kept out of the scores, it adds no rounding to the
        # gradient of g, which at g = -5 is a hundred times smaller than that term.
        own = einsum("BHCK,BHCK->BHC", q, k)[..., None]
        step = (new, W, at.to_state(k), at.kept_BHK1()[..., 0])
        return step, (at.scores(q, k), at.from_state(q), own)

    def one_chunk(S_BHKV, x):
        new_BHCV, W_BHCK, rest_BHCK, kept_BHK = x
        if W_BHCK is not None:
            new_BHCV = new_BHCV - einsum("BHCK,BHKV->BHCV", W_BHCK, S_BHKV)
        # As an einsum, its gradient is a batch of dot products: a product and a sum over V would be
        # 56 us a chunk on a CPU, a tenth of everything.
        kept_BHKV = einsum("BHK,BHKV->BHKV", kept_BHK, S_BHKV)
        written_BHKV = einsum("BHCK,BHCV->BHKV", rest_BHCK, new_BHCV)
        return kept_BHKV + written_BHKV, (new_BHCV, S_BHKV)

    def outputs(S_BHKV, new_BHCV, A_qk, from_state_BHCK, own_BHC1):
        old_BHCV = einsum("BHCK,BHKV->BHCV", from_state_BHCK, S_BHKV)
        o_BHCV = old_BHCV + einsum("BHij,BHjV->BHiV", A_qk, new_BHCV) + own_BHC1 * new_BHCV
        return (scale * o_BHCV).astype(v.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_group(S_BHKV, x):
        steps, reads = jax.vmap(inside)(*x)
        S_BHKV, (new, S) = jax.lax.scan(one_chunk, S_BHKV, steps)
        return S_BHKV, jax.vmap(outputs)(S, new, *reads)

    S_BHKV, o_GNBHCV = jax.lax.scan(one_group, initial_state, xs)
    return join_chunks(o_GNBHCV, T), S_BHKV
