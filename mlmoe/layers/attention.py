"""Softmax attention: F (full, RoPE), and gated latent attention: L (NoPE), R (RoPE), B (ALiBi).

Latent attention caches one latent c_T (and one shared key) in place of per-head keys and values:

    q = W_uq RMSNorm(W_dq x),   [c, k_r] = W_dkv x,   [k_n, v] = W_ukv RMSNorm(c)
    o = softmax(q . [k_n, k_r] / sqrt(nope + rope)) v,   y = W_o [sigmoid(W_g x) * o]

In L and B the `rope` channels are kept but not rotated; in R they carry the position. B takes
m_h (i - j) from the score of query i and key j, m_h = 2^(-8 h / H), h = 1 .. H (arXiv 2108.12409).
With kv_share = n, the first of n consecutive latent layers makes c and k_r, and the others read
them: only W_ukv, which turns them into keys and values, is every layer's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.layers.linear import project
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import OUT, fan_in, param
from mlmoe.layers.rope import rotate

# A row's queries in so many parts (few, or many where they are long), each against the keys up to
# its own end only. Longer parts go through in blocks of so many queries, recomputed backward: their
# scores should fit a cache. Gradient of 2 heads of 64 on 2 cores, in seconds, 2,048, 8,192 and
# 32,768 tokens: blocks of 1024 in 8 parts 0.20, 2.25, 31; of 256 in 8 parts 0.11, 1.44, 26.
SECTIONS = (2, 16)  # 0.08, 1.44, 23
QUERY_BLOCK = 256
# Keys of a row of more than KEYS_AT_ONCE in blocks, too. Forward, and with its gradient, 8,192 and
# 32,768 tokens, in seconds, measured apart from those above with huge pages for malloc: all at once
# 0.39, 5.6 and 0.68, 12.3; blocks of 512 0.23, 3.3 and 0.79, 13.0.
KEYS_AT_ONCE, KEY_BLOCK = 16_384, 512
LEAST = -1e30  # the score of a key that is not seen


class Latent(NamedTuple):
    """What a latent layer caches, and layers that share it read."""

    c_BTR: jax.Array  # normalised
    shared_BTP: jax.Array  # the key of all heads, not rotated


def alibi_slopes(heads: int) -> jax.Array:
    """m_h = 2^(-8 h / H), h = 1 .. H."""
    return 2.0 ** (-8.0 * jnp.arange(1, heads + 1, dtype=jnp.float32) / heads)


def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    document_BT: jax.Array,
    slope_H: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K) - slope * distance) v over earlier tokens of the same document.

    0 at padding. Scores, softmax and their gradient are float32. Sections spare 1/4 of the work, of
    long rows 15/32, on tokens that are never seen: 1/2 would be all of it. Scores of a long row
    exist for QUERY_BLOCK queries at a time: memory is linear in T.
    """
    T, K = q_BTHK.shape[1], q_BTHK.shape[-1]
    q_BTHK = q_BTHK * K**-0.5
    fewest, most = SECTIONS
    size = max(-(-T // most), min(-(-T // fewest), QUERY_BLOCK))
    parts = []
    for start in range(0, T, size):
        end = min(start + size, T)
        k, v, document = (x[:, :end] for x in (k_BTHK, v_BTHV, document_BT))
        parts.append(_attend_section(q_BTHK[:, start:end], k, v, document, slope_H))
    return jnp.concatenate(parts, axis=1)


def _attend_section(
    q_BQHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    document_BS: jax.Array,
    slope_H: jax.Array | None,
) -> jax.Array:
    """The last Q queries of a row of S tokens."""
    Q, S = q_BQHK.shape[1], k_BSHK.shape[1]
    row_Q = jnp.arange(S - Q, S)
    if Q <= QUERY_BLOCK:
        return _attend_rows(q_BQHK, row_Q, k_BSHK, v_BSHV, document_BS, slope_H)
    pad = -Q % QUERY_BLOCK  # the last query again, cut off afterwards
    index_NC = jnp.minimum(jnp.arange(Q + pad), Q - 1).reshape(-1, QUERY_BLOCK)
    q_NBCHK = jnp.moveaxis(jnp.take(q_BQHK, index_NC, axis=1), 1, 0)

    @jax.checkpoint
    def block(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend_rows(*x, k_BSHK, v_BSHV, document_BS, slope_H)

    o_NBCHV = jax.lax.map(block, (q_NBCHK, row_Q[index_NC]))
    o_BQHV = jnp.moveaxis(o_NBCHV, 0, 1).reshape(q_BQHK.shape[0], Q + pad, *v_BSHV.shape[2:])
    return o_BQHV[:, :Q]


def _attend_rows(
    q_BQHK: jax.Array,
    row_Q: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    document_BS: jax.Array,
    slope_H: jax.Array | None,
) -> jax.Array:
    """Queries at places row_Q of a row; keys of long rows in blocks, with a running softmax."""
    document_BQ = jnp.take(document_BS, row_Q, axis=1)

    def scores(k_BSHK: jax.Array, document_BS: jax.Array, first: jax.Array | int) -> jax.Array:
        s_BHQS = jnp.einsum("BQHK,BSHK->BHQS", q_BQHK, k_BSHK, preferred_element_type=jnp.float32)
        distance_QS = row_Q[:, None] - (first + jnp.arange(k_BSHK.shape[1]))[None]
        if slope_H is not None:
            s_BHQS -= jnp.einsum("H,QS->HQS", slope_H, distance_QS.astype(jnp.float32))[None]
        seen_BQS = (document_BQ[:, :, None] == document_BS[:, None]) & (distance_QS >= 0)[None]
        return jnp.where(seen_BQS[:, None], s_BHQS, LEAST)

    if k_BSHK.shape[1] <= KEYS_AT_ONCE:
        p_BHQS = jax.nn.softmax(scores(k_BSHK, document_BS, 0), axis=-1)
        o_BQHV = jnp.einsum("BHQS,BSHV->BQHV", p_BHQS.astype(v_BSHV.dtype), v_BSHV)
    else:
        o_BQHV = _in_key_blocks(scores, q_BQHK.shape, k_BSHK, v_BSHV, document_BS)
    return jnp.where((document_BQ > 0)[..., None, None], o_BQHV, 0)


def _in_key_blocks(
    scores: Callable[..., jax.Array],
    shape: tuple[int, ...],
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    document_BS: jax.Array,
) -> jax.Array:
    """softmax(scores) v over blocks of keys: largest score, sum and output so far, rescaled."""
    B, Q, H, _ = shape
    pad = -k_BSHK.shape[1] % KEY_BLOCK

    def blocks(x_BS: jax.Array) -> jax.Array:
        x_BS = jnp.pad(x_BS, ((0, 0), (0, pad)) + ((0, 0),) * (x_BS.ndim - 2))
        return jnp.moveaxis(x_BS.reshape(B, -1, KEY_BLOCK, *x_BS.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(carry, block):  # type: ignore[no-untyped-def]
        most_BHQ, sum_BHQ, o_BHQV = carry
        k_BSHK, v_BSHV, document_BS, first = block
        s_BHQS = scores(k_BSHK, document_BS, first)
        # The shift by the largest score cancels in the gradient; it only guards exp.
        new_BHQ = jnp.maximum(most_BHQ, jax.lax.stop_gradient(jnp.max(s_BHQS, axis=-1)))
        p_BHQS, kept_BHQ = jnp.exp(s_BHQS - new_BHQ[..., None]), jnp.exp(most_BHQ - new_BHQ)
        added_BHQV = jnp.einsum("BHQS,BSHV->BHQV", p_BHQS.astype(v_BSHV.dtype), v_BSHV)
        o_BHQV = o_BHQV * kept_BHQ[..., None] + added_BHQV.astype(jnp.float32)
        return (new_BHQ, sum_BHQ * kept_BHQ + jnp.sum(p_BHQS, axis=-1), o_BHQV), None

    none = jnp.zeros((B, H, Q))
    start = (none + LEAST, none, jnp.zeros((B, H, Q, v_BSHV.shape[-1])))
    places = jnp.arange(0, k_BSHK.shape[1] + pad, KEY_BLOCK)
    cut = (blocks(k_BSHK), blocks(v_BSHV), blocks(document_BS), places)
    (_, sum_BHQ, o_BHQV), _ = jax.lax.scan(step, start, cut)
    return jnp.swapaxes(o_BHQV / sum_BHQ[..., None], 1, 2).astype(v_BSHV.dtype)


class FullAttention(nn.Module):
    """Layer F: multi-head softmax attention with RoPE."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, document_BT: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        c, D = self.config.attention, self.config.d_model
        H, K = c.heads, c.head_dim
        w_q = param(self, "w_q", fan_in(D), (D, H, K), "embed heads key")
        w_k = param(self, "w_k", fan_in(D), (D, H, K), "embed heads key")
        w_v = param(self, "w_v", fan_in(D), (D, H, K), "embed heads value")
        w_o = param(self, "w_o", fan_in(H * K, OUT), (H, K, D), "heads value embed")
        q, k, v = (project("BTD,DHK->BTHK", x_BTD, w) for w in (w_q, w_k, w_v))
        q, k = (rotate(x, positions_BT, c.rope_theta) for x in (q, k))
        o_BTHK = attend(q, k, v, document_BT)
        return project("BTHK,HKD->BTD", o_BTHK, w_o)


class LatentAttention(nn.Module):
    """Layers L, R and B: gated multi-head latent attention. `shared` is the latent of the layer
    that this one follows, or None where it makes its own; returns y and the latent."""

    config: ModelConfig
    dtype: jnp.dtype
    letter: str

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        document_BT: jax.Array,
        positions_BT: jax.Array,
        shared: Latent | None = None,
    ) -> tuple[jax.Array, Latent]:
        c, D, eps = self.config.attention, self.config.d_model, self.config.norm_eps
        H, V, Q, R, N, P = c.heads, c.v_dim, c.q_rank, c.kv_rank, c.nope_dim, c.rope_dim
        w_dq = param(self, "w_dq", fan_in(D), (D, Q), "embed rank")
        w_uq = param(self, "w_uq", fan_in(Q), (Q, H, N + P), "rank heads key")
        w_ukv = param(self, "w_ukv", fan_in(R), (R, H, N + V), "rank heads key")
        w_gate = param(self, "w_gate", fan_in(D), (D, H, V), "embed heads value")
        w_o = param(self, "w_o", fan_in(H * V, OUT), (H, V, D), "heads value embed")

        q_BTQ = RMSNorm(eps, name="q_norm")(project("BTD,DQ->BTQ", x_BTD, w_dq))
        q_BTHK = project("BTQ,QHK->BTHK", q_BTQ, w_uq)
        latent = self._latent(x_BTD) if shared is None else shared
        k_BTHN, v_BTHV = jnp.split(project("BTR,RHK->BTHK", latent.c_BTR, w_ukv), [N], axis=-1)
        k_BT1P = latent.shared_BTP[:, :, None]
        if self.letter == "R":
            q_BTHN, q_BTHP = jnp.split(q_BTHK, [N], axis=-1)
            q_BTHP = rotate(q_BTHP, positions_BT, c.rope_theta)
            q_BTHK = jnp.concatenate([q_BTHN, q_BTHP], axis=-1)
            k_BT1P = rotate(k_BT1P, positions_BT, c.rope_theta)
        k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], P))
        k_BTHK = jnp.concatenate([k_BTHN, k_BTHP], axis=-1)
        slope_H = alibi_slopes(H) if self.letter == "B" else None
        o_BTHV = attend(q_BTHK, k_BTHK, v_BTHV, document_BT, slope_H)
        gate_BTHV = jax.nn.sigmoid(project("BTD,DHV->BTHV", x_BTD, w_gate))
        return project("BTHV,HVD->BTD", gate_BTHV * o_BTHV, w_o), latent

    def _latent(self, x_BTD: jax.Array) -> Latent:
        c, D = self.config.attention, self.config.d_model
        R, P = c.kv_rank, c.rope_dim
        w_dkv = param(self, "w_dkv", fan_in(D), (D, R + P), "embed rank")
        c_BTR, shared_BTP = jnp.split(project("BTD,DR->BTR", x_BTD, w_dkv), [R], axis=-1)
        return Latent(RMSNorm(self.config.norm_eps, name="kv_norm")(c_BTR), shared_BTP)
