"""Softmax attention: F (full, RoPE), L and R (gated latent attention, NoPE and RoPE).

Latent attention caches one latent c_T (and one shared key) in place of per-head keys and values:

    q = W_uq RMSNorm(W_dq x),   [c, k_r] = W_dkv x,   [k_n, v] = W_ukv RMSNorm(c)
    o = softmax(q . [k_n, k_r] / sqrt(nope + rope)) v,   y = W_o [sigmoid(W_g x) * o]

In L the `rope` channels are kept but not rotated; in R they carry the position.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.layers.linear import project
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import OUT, fan_in, param
from mlmoe.layers.rope import rotate

SECTIONS = 2  # a row's queries in so many parts, each against the keys up to its own end only
QUERY_BLOCK = 1024  # longer sections go through in blocks of so many queries, recomputed backward


def attend(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHV: jax.Array, document_BT: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over earlier tokens of the same document; 0 at padding.

    Scores, softmax and their gradient are float32. Sections spare 1/4 of the work on tokens that
    are never seen. Scores of a long row exist for 1024 queries at a time: memory is linear in T.
    """
    T, K = q_BTHK.shape[1], q_BTHK.shape[-1]
    q_BTHK = q_BTHK * K**-0.5
    size = -(-T // SECTIONS)
    parts = []
    for start in range(0, T, size):
        end = min(start + size, T)
        seen = (x[:, :end] for x in (k_BTHK, v_BTHV, document_BT))
        parts.append(_attend_section(q_BTHK[:, start:end], *seen))
    return jnp.concatenate(parts, axis=1)


def _attend_section(
    q_BQHK: jax.Array, k_BSHK: jax.Array, v_BSHV: jax.Array, document_BS: jax.Array
) -> jax.Array:
    """The last Q queries of a row of S tokens."""
    Q, S = q_BQHK.shape[1], k_BSHK.shape[1]
    row_Q = jnp.arange(S - Q, S)
    if Q <= QUERY_BLOCK:
        return _attend_rows(q_BQHK, row_Q, k_BSHK, v_BSHV, document_BS)
    pad = -Q % QUERY_BLOCK  # the last query again, cut off afterwards
    index_NC = jnp.minimum(jnp.arange(Q + pad), Q - 1).reshape(-1, QUERY_BLOCK)
    q_NBCHK = jnp.moveaxis(jnp.take(q_BQHK, index_NC, axis=1), 1, 0)

    @jax.checkpoint
    def block(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend_rows(*x, k_BSHK, v_BSHV, document_BS)

    o_NBCHV = jax.lax.map(block, (q_NBCHK, row_Q[index_NC]))
    o_BQHV = jnp.moveaxis(o_NBCHV, 0, 1).reshape(q_BQHK.shape[0], Q + pad, *v_BSHV.shape[2:])
    return o_BQHV[:, :Q]


def _attend_rows(
    q_BQHK: jax.Array,
    row_Q: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    document_BS: jax.Array,
) -> jax.Array:
    score_BHQS = jnp.einsum("BQHK,BSHK->BHQS", q_BQHK, k_BSHK, preferred_element_type=jnp.float32)
    document_BQ = jnp.take(document_BS, row_Q, axis=1)
    earlier_QS = row_Q[:, None] >= jnp.arange(k_BSHK.shape[1])[None]
    seen_BQS = (document_BQ[:, :, None] == document_BS[:, None]) & earlier_QS[None]
    p_BHQS = jax.nn.softmax(jnp.where(seen_BQS[:, None], score_BHQS, -1e30), axis=-1)
    o_BQHV = jnp.einsum("BHQS,BSHV->BQHV", p_BHQS.astype(v_BSHV.dtype), v_BSHV)
    return jnp.where((document_BQ > 0)[..., None, None], o_BQHV, 0)


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
    """Layers L (`rotary=False`) and R (`rotary=True`): gated multi-head latent attention."""

    config: ModelConfig
    dtype: jnp.dtype
    rotary: bool

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, document_BT: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        c, D, eps = self.config.attention, self.config.d_model, self.config.norm_eps
        H, V, Q, R, N, P = c.heads, c.v_dim, c.q_rank, c.kv_rank, c.nope_dim, c.rope_dim
        w_dq = param(self, "w_dq", fan_in(D), (D, Q), "embed rank")
        w_uq = param(self, "w_uq", fan_in(Q), (Q, H, N + P), "rank heads key")
        w_dkv = param(self, "w_dkv", fan_in(D), (D, R + P), "embed rank")
        w_ukv = param(self, "w_ukv", fan_in(R), (R, H, N + V), "rank heads key")
        w_gate = param(self, "w_gate", fan_in(D), (D, H, V), "embed heads value")
        w_o = param(self, "w_o", fan_in(H * V, OUT), (H, V, D), "heads value embed")

        q_BTQ = RMSNorm(eps, name="q_norm")(project("BTD,DQ->BTQ", x_BTD, w_dq))
        q_BTHK = project("BTQ,QHK->BTHK", q_BTQ, w_uq)
        c_BTR, shared_BTP = jnp.split(project("BTD,DR->BTR", x_BTD, w_dkv), [R], axis=-1)
        c_BTR = RMSNorm(eps, name="kv_norm")(c_BTR)
        k_BTHN, v_BTHV = jnp.split(project("BTR,RHK->BTHK", c_BTR, w_ukv), [N], axis=-1)
        k_BT1P = shared_BTP[:, :, None]
        if self.rotary:
            q_BTHN, q_BTHP = jnp.split(q_BTHK, [N], axis=-1)
            q_BTHP = rotate(q_BTHP, positions_BT, c.rope_theta)
            q_BTHK = jnp.concatenate([q_BTHN, q_BTHP], axis=-1)
            k_BT1P = rotate(k_BT1P, positions_BT, c.rope_theta)
        k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], P))
        o_BTHV = attend(q_BTHK, jnp.concatenate([k_BTHN, k_BTHP], axis=-1), v_BTHV, document_BT)
        gate_BTHV = jax.nn.sigmoid(project("BTD,DHV->BTHV", x_BTD, w_gate))
        return project("BTHV,HVD->BTD", gate_BTHV * o_BTHV, w_o)
