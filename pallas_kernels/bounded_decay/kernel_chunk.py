"""One chunk in the TPU kernels, forward and backward, for the heads of a block.

The state is held transposed, [H, V, K]: its decay then runs along the lanes. beta arrives along
the lanes too, [H, 1, C]; None is the additive rule. `dtype` is what matmul operands are rounded to
(that of the inputs); sums, decays, masks, the state and its gradient are f32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bounded_decay.kernel_tiles import (
    Decays,
    Masks,
    column,
    einsum,
    iota,
    scores,
    spread,
    sum_rows,
    tiles_of,
    unit_lower_inverse,
)
from pallas_kernels.bounded_decay.tiles import TILE


class Inputs(NamedTuple):
    """A chunk's inputs in f32, exact zeros at padding. beta [H, C, 1]."""

    q_HCK: jax.Array
    k_HCK: jax.Array
    v_HCV: jax.Array
    g_HCK: jax.Array
    beta_HC1: jax.Array | None

    @classmethod
    def open(cls, masks: Masks, q, k, v, g, beta_H1C) -> "Inputs":
        q, k, v, g = (live(x.astype(jnp.float32), masks) for x in (q, k, v, g))
        beta = None if beta_H1C is None else live(column(beta_H1C)[:, :, :1], masks)
        return cls(q, k, v, g, beta)


def live(x_HCK, masks: Masks):
    return jnp.where(masks.live_C1, x_HCK, 0.0)


def forward_chunk(x: Inputs, masks: Masks, S_HVK, scale: float, dtype):
    """(o [H,C,V], state after the chunk, (I + A)^-1 or None), all f32.

    w = (I + A)^-1 beta (v - (exp(G) k) S)  (additive: v);   o = scale ((exp(G) q) S + A_qk w)
    S' = exp(G_C) S + (exp(G_C - G) k)^T w
    """
    C = x.q_HCK.shape[1]
    d = Decays.open(x.g_HCK, masks, dtype)
    own, key = x.k_HCK * d.own_HCK, x.k_HCK * d.key_HCK
    if x.beta_HC1 is None:
        (A_qk,) = scores([x.q_HCK * d.query_HCK], own, key, d, dtype)
        old = einsum("HCK,HVK->HCV", x.q_HCK * d.start_HCK, S_HVK, dtype)
        X, w = None, x.v_HCV
    else:
        queries = [x.q_HCK * d.query_HCK, x.k_HCK * d.query_HCK]
        A_qk, A_kk = scores(queries, own, key, d, dtype)
        X = unit_lower_inverse(jnp.where(masks.earlier_CC, x.beta_HC1 * A_kk, 0.0), dtype)
        both = jnp.concatenate([x.q_HCK * d.start_HCK, x.k_HCK * d.start_HCK], 1)
        reads = einsum("HCK,HVK->HCV", both, S_HVK, dtype)
        old, predicted = reads[:, :C], jnp.where(masks.reads_C1, reads[:, C:], 0.0)
        w = einsum("HCD,HDV->HCV", X, x.beta_HC1 * (x.v_HCV - predicted), dtype, split="x")
    A_qk = jnp.where(masks.earlier_CC, A_qk, 0.0)
    o = jnp.where(masks.reads_C1, old, 0.0) + einsum("HCD,HDV->HCV", A_qk, w, dtype, split="y")
    o += jnp.sum(x.q_HCK * x.k_HCK, -1, keepdims=True) * w  # a token reads its own write undecayed
    rest = jnp.where(masks.writes_C1, x.k_HCK * d.rest_HCK, 0.0)
    kept = jnp.where(masks.keeps_11, S_HVK * d.whole_H1K, 0.0)
    return live(scale * o, masks), kept + einsum("HCV,HCK->HVK", w, rest, dtype, split="x"), X


class Gradients(NamedTuple):
    q_HCK: jax.Array
    k_HCK: jax.Array
    v_HCV: jax.Array
    g_HCK: jax.Array
    beta_H1C: jax.Array | None
    S_HVK: jax.Array  # of the state that entered the chunk


def backward_chunk(x: Inputs, masks: Masks, S_HVK, X, do_HCV, dS_HVK, scale: float, dtype):
    """Gradients of a chunk from those of its output and of the state after it.

    S and X are what forward_chunk was given and returned. With w as there, y the gradient of
    beta (v - ...) and r = v - (exp(G) k) S:

        dw = scale A_qk^T do + (exp(G_C - G) k) dS;   y = X^T dw;   dv = beta y;
        d A_kk = -beta y w^T
        dS' = exp(G_C) dS + scale (exp(G) q)^T do - (exp(G) k)^T dv
    """
    C = x.q_HCK.shape[1]
    q, k, beta = x.q_HCK, x.k_HCK, x.beta_HC1
    do = live(do_HCV.astype(jnp.float32) * scale, masks)
    S = S_HVK.astype(jnp.float32)
    d = Decays.open(x.g_HCK, masks, dtype)
    own, key = k * d.own_HCK, k * d.key_HCK
    queries = [q * d.query_HCK] if beta is None else [q * d.query_HCK, k * d.query_HCK]
    A = [jnp.where(masks.earlier_CC, s, 0.0) for s in scores(queries, own, key, d, dtype)]
    rest = jnp.where(masks.writes_C1, k * d.rest_HCK, 0.0)
    read_q = jnp.where(masks.reads_C1, q * d.start_HCK, 0.0)
    dw = einsum("HDC,HDV->HCV", A[0], do, dtype) + einsum("HCK,HVK->HCV", rest, dS_HVK, dtype)
    dw += jnp.sum(q * k, -1, keepdims=True) * do
    if beta is None:
        w, dv, dbeta = x.v_HCV, dw, None
        writes, reads = do, read_q
        dscores = einsum("HCV,HDV->HCD", do, w, dtype)
    else:
        read_k = jnp.where(masks.reads_C1, k * d.start_HCK, 0.0)
        r = x.v_HCV - einsum("HCK,HVK->HCV", read_k, S, dtype)
        w = einsum("HCD,HDV->HCV", X, beta * r, dtype, split="xy")
        y = einsum("HDC,HDV->HCV", X, dw, dtype, split="xy")
        dv = beta * y
        writes, reads = jnp.concatenate([do, -dv], 1), jnp.concatenate([read_q, read_k], 1)
        dscores = einsum("HCV,HDV->HCD", jnp.concatenate([do, -y], 1), w, dtype)
        dA_kk = jnp.where(masks.earlier_CC, dscores[:, C:], 0.0)
        dbeta = jnp.sum(y * r, -1, keepdims=True) + jnp.sum(dA_kk * A[1], -1, keepdims=True)
        dbeta = column_to_row(dbeta)
    dA = [jnp.where(masks.earlier_CC, dscores[:, :C], 0.0)]
    dA += [] if beta is None else [beta * dA_kk]
    dqueries, dk_column = _score_gradients(dA, queries, own, key, d, dtype)
    dreads = einsum("HCV,HVK->HCK", writes, S, dtype)
    dreads = [jnp.where(masks.reads_C1, x, 0.0) for x in jnp.split(dreads, len(dA), axis=1)]
    drows = [d.query_HCK * x + d.start_HCK * y for x, y in zip(dqueries, dreads, strict=True)]
    drest = jnp.where(masks.writes_C1, einsum("HCV,HVK->HCK", w, dS_HVK, dtype), 0.0)
    dk_rest = d.rest_HCK * drest
    dk_column += dk_rest
    dq, dk_row = drows[0], 0.0 if beta is None else drows[1]
    # Whatever q or k is multiplied by exp(+-G) with carries the gradient of G, and g_t is in every
    # G of its document from t on. A token's read of its own write is not among them.
    kept = jnp.where(masks.keeps_11, d.whole_H1K, 0.0)
    last = jnp.sum(k * dk_rest, 1, keepdims=True) + kept * jnp.sum(dS_HVK * S, 1, keepdims=True)
    later_CC = masks.same_CC & (iota((C, C), 0) <= iota((C, C), 1))
    dg = sum_rows(later_CC, q * dq + k * (dk_row - dk_column), dtype)
    dg += jnp.where(masks.writes_C1, last, 0.0)
    own_write = jnp.sum(do * w, -1, keepdims=True)
    return Gradients(
        q_HCK=live(dq + own_write * k, masks),
        k_HCK=live(dk_row + dk_column + own_write * q, masks),
        v_HCV=live(dv, masks),
        g_HCK=live(dg, masks),
        beta_H1C=dbeta,
        S_HVK=kept * dS_HVK + einsum("HCV,HCK->HVK", writes, reads, dtype),
    )


def column_to_row(x_HC1):
    """[H, C, 1] -> [H, 1, C]."""
    H, C, _ = x_HC1.shape
    return jnp.broadcast_to(x_HC1, (H, C, C)).swapaxes(1, 2)[:, :1]


def _score_gradients(dA, queries, own, key, d: Decays, dtype):
    """From the gradients of `scores`: those of its queries, and of k with the decays applied."""
    H, C, K = own.shape
    drows, down, dkey = [], [], jnp.zeros((H, C, K), jnp.float32)
    queries_of = dict(tiles_of(*queries))
    for a, dA_HiC in tiles_of(*dA):
        dA_Hij = dA_HiC[:, :, : (a + 1) * TILE]
        drow = einsum("Hij,HjK->HiK", dA_Hij, d.keys(own, key, a), dtype)
        drows.append(jnp.split(drow, len(dA), axis=1))
        dseen = einsum("Hij,HiK->HjK", dA_Hij, queries_of[a], dtype)
        down.append(dseen[:, a * TILE :])
        if a:
            dseen = dseen[:, : a * TILE] * spread(d.between(a), a * TILE)
            dkey += jnp.pad(dseen, ((0, 0), (0, C - a * TILE), (0, 0)))
    dk = d.own_HCK * jnp.concatenate(down, 1) + d.key_HCK * dkey
    return [jnp.concatenate(x, 1) for x in zip(*drows, strict=True)], dk
