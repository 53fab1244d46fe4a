"""Bounded-decay recurrence, C tokens at a time: plain jnp, any backend, the same values as ref.py.

With G the running sum of g inside the chunk, i and j its tokens and S the state that enters it:

    K[i,j] = sum_d k_i[d] k_j[d] exp(G_i[d]-G_j[d])  (i>j);   A likewise with q for k_i  (i>=j)
    u  = (I + K beta)^-1 (v - (exp(G) k) S),   w = beta u      (additive: w = u = v)
    o  = (exp(G) q) S + A w;   S' = diag(exp(G_C)) S + (exp(G_C - G) k)^T w

All but u and S' is done for a group of chunks at once, and only those two chunk by chunk. The
gradient keeps u, (I + K beta)^-1 and the state at each group's start, and computes the rest again.
Groups keep an operation's arrays at a size that fills the machine. op.py calls this with padding
folded in and documents numbered.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bounded_decay.ref import einsum
from pallas_kernels.bounded_decay.tiles import Chunk, chunk_size, join_chunks, split_chunks
from pallas_kernels.bounded_decay.triangular import unit_lower_inverse

GROUP = 64  # heads x rows x chunks of one group


def bounded_decay_chunked(q, k, v, g, beta, initial_state, document, scale):
    """o [B,T,H,V] (v's dtype) and the final state [B,H,K,V] f32. First derivatives only.

    q, k, g [B,T,H,K]; v [B,T,H,V]; beta [B,T,H], None for the additive rule; initial_state
    [B,H,K,V] f32; document [B,T] int32, never decreasing, 0 for what continues initial_state.
    """
    B, T, H, K = q.shape
    beta = None if beta is None else beta[..., None]
    C = chunk_size(K)
    group = max(1, min(-(-T // C), GROUP // (B * H)))
    q = scale * q.astype(jnp.float32)
    chunks = _Chunks(*split_chunks((q, k, v, g, beta), document, C, group))
    o_GNBHCV, S_BHKV = _recurrence(chunks, initial_state)
    return join_chunks(o_GNBHCV, T), S_BHKV


class _Chunks(NamedTuple):
    """What split_chunks returns: groups of chunks, one group or one chunk."""

    inputs: tuple  # q (scaled), k, v, g, beta [...,B,H,C,width]
    document: jax.Array | None  # int32 [...,B,C]; None in a gradient
    before: jax.Array | None  # int32 [...,B]

    def open(self):
        """One chunk's inputs in f32 and its decays."""
        inputs = jax.tree.map(lambda x: x.astype(jnp.float32), self.inputs)
        return *inputs, Chunk.open(inputs[3], self.document, self.before)


@jax.custom_vjp
def _recurrence(groups: _Chunks, S_BHKV):
    return _forward(groups, S_BHKV)[0]


def _forward(groups: _Chunks, S_BHKV):
    def group(S_BHKV, chunks):
        steps, reads, X = jax.vmap(_without_state)(chunks)
        end_BHKV, (old, u) = jax.lax.scan(_next_state, S_BHKV, steps)
        o = jax.vmap(lambda old, A, u: old + einsum("BHij,BHjV->BHiV", A, u))(old, reads, u)
        return end_BHKV, (o.astype(chunks.inputs[2].dtype), (S_BHKV, u, X))

    S_BHKV, (o, saved) = jax.lax.scan(group, S_BHKV, groups)
    return (o, S_BHKV), (groups, saved)


def _without_state(chunk: _Chunks):
    """What the scan over chunks needs, A beta with its diagonal, and (I + K beta)^-1."""
    q, k, v, _, beta, at = chunk.open()
    own = einsum("BHCK,BHCK->BHC", q, k)[..., None] * jnp.eye(q.shape[2])[None, None]
    reads, rest = at.from_state(q), at.to_state(k)
    if beta is None:
        (A,) = at.scores([q], k)
        return (reads, rest, v, at.kept_BHK1()), A + own, None
    A, K = at.scores([q, k], k)
    beta_BH1C = beta.swapaxes(2, 3)
    X = unit_lower_inverse(K * beta_BH1C)
    W = einsum("BHij,BHjK->BHiK", X, at.from_state(k))
    step = jnp.concatenate([reads, W], 2), beta * rest, einsum("BHij,BHjV->BHiV", X, v)
    return (*step, at.kept_BHK1()), (A + own) * beta_BH1C, X


def _next_state(S_BHKV, step):
    """S -> (S', (what the queries read of S, u))."""
    reads, rest, u, kept = step
    C = u.shape[2]
    read = einsum("BHCK,BHKV->BHCV", reads, S_BHKV)
    if reads.shape[2] > C:
        u = u - read[:, :, C:]
    return kept * S_BHKV + einsum("BHCK,BHCV->BHKV", rest, u), (read[:, :, :C], u)


def _backward(residuals, cotangents):
    groups, saved = residuals
    do, dS_BHKV = cotangents

    def group(dS_BHKV, x):
        chunks, (S_BHKV, u, X), do = x
        steps, rest = jax.vmap(_towards_state)(chunks, u, X, do)
        _, S = jax.lax.scan(_state_again, S_BHKV, rest)
        dS_BHKV, (dw, dS) = jax.lax.scan(_previous_gradient, dS_BHKV, steps, reverse=True)
        return dS_BHKV, jax.vmap(_inputs_gradient)(chunks, u, X, do, S, dS, dw)

    dS_BHKV, dinputs = jax.lax.scan(group, dS_BHKV, (groups, saved, do), reverse=True)
    dinputs = jax.tree.map(lambda d, x: d.astype(x.dtype), dinputs, groups.inputs)
    return _Chunks(dinputs, None, None), dS_BHKV


_recurrence.defvjp(_forward, _backward)


def _towards_state(chunk: _Chunks, u, X, do):
    """What the two scans of the backward pass need of a chunk."""
    q, k, _, _, beta, at = chunk.open()
    do = do.astype(jnp.float32)
    (A,) = at.scores([q], k)
    own = einsum("BHCK,BHCK->BHC", q, k)[..., None]
    rest, kept = at.to_state(k), at.kept_BHK1()
    dw = einsum("BHij,BHiV->BHjV", A, do) + own * do
    dS = einsum("BHCK,BHCV->BHKV", at.from_state(q), do)
    if beta is None:
        return (kept, rest, None, dw, dS), (kept, rest, u)
    W = beta * einsum("BHij,BHjK->BHiK", X, at.from_state(k))
    return (kept, rest, W, dw, dS), (kept, rest, beta * u)


def _state_again(S_BHKV, step):
    kept, rest, w = step
    return kept * S_BHKV + einsum("BHCK,BHCV->BHKV", rest, w), S_BHKV


def _previous_gradient(dS_BHKV, step):
    """dS' -> (dS, (dw, dS')): the gradients of S and of w from that of S'."""
    kept, rest, W, dw, dS_from_o = step
    dw = dw + einsum("BHCK,BHKV->BHCV", rest, dS_BHKV)
    before = kept * dS_BHKV + dS_from_o
    if W is not None:
        before = before - einsum("BHCK,BHCV->BHKV", W, dw)
    return before, (dw, dS_BHKV)


def _inputs_gradient(chunk: _Chunks, u, X, do, S_BHKV, dS_BHKV, dw):
    """The gradients of a chunk's q, k, v, g, beta; S entered it, dS is of the state after it.

    dv = (I + K beta)^-T beta dw;   dA = do w^T,   dK = -dv w^T;   dbeta = u (dw - K^T dv)
    """
    q, k, _, _, beta, at = chunk.open()
    do, C = do.astype(jnp.float32), q.shape[2]
    rows, w, dv, dbeta, writes = [q], u, dw, None, do
    if beta is not None:
        rows, w = [q, k], beta * u
        dv = einsum("BHij,BHiV->BHjV", X, beta * dw)
        (K,) = at.scores([k], k)
        dbeta = jnp.sum(u * (dw - einsum("BHij,BHiV->BHjV", K, dv)), -1, keepdims=True)
        writes = jnp.concatenate([do, -dv], 2)
    dscores = jnp.split(einsum("BHiV,BHjV->BHij", writes, w), len(rows), 2)
    dreads = jnp.split(einsum("BHCV,BHKV->BHCK", writes, S_BHKV), len(rows), 2)
    drows, dk_column = at.scores_gradient(rows, k, dscores)
    drows = [dx + at.from_state(dread) for dx, dread in zip(drows, dreads, strict=True)]
    dk_rest = at.to_state(einsum("BHCV,BHKV->BHCK", w, dS_BHKV))
    dk_column = dk_column + dk_rest
    dq, dk_row = drows[0], 0.0 if beta is None else drows[1]
    # Whatever q or k is multiplied by exp(+-G) with carries the gradient of G, and g_t is in every
    # G of its document from t on. A token's read of its own write is not among them: at g = -5 it
    # is a hundred times larger, and would leave its rounding.
    later_BCC = (at.same_BCC & np.tri(C, dtype=bool)[None]).astype(jnp.float32)
    dg = einsum("Bji,BHjK->BHiK", later_BCC, q * dq + k * (dk_row - dk_column))
    last_BHK = jnp.sum(k * dk_rest, 2) + jnp.sum(at.kept_BHK1() * dS_BHKV * S_BHKV, 3)
    dg = dg + jnp.where(at.writes_BHC1, last_BHK[:, :, None], 0.0)
    own_write = jnp.sum(do * w, -1, keepdims=True)
    return dq + own_write * k, dk_row + dk_column + own_write * q, dv, dg, dbeta
