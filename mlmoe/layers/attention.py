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
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import fan_in, param
from mlmoe.layers.rope import rotate

# Scores of one block of queries are B*H*1024*T floats; more rows than that are done in turn.
QUERY_BLOCK = 1024


def attend(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHV: jax.Array, document_BT: jax.Array
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over earlier tokens of the same document; 0 at padding.

    Scores, softmax and their gradient are float32. Long rows go through in blocks of queries whose
    scores are recomputed in the backward pass, so memory is linear in T.
    """
    B, T, H, K = q_BTHK.shape
    q_BTHK = q_BTHK * K**-0.5

    def block(q_BTHK: jax.Array, row_T: jax.Array) -> jax.Array:
        score = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BTHK, preferred_element_type=jnp.float32)
        document_BQ = jnp.take(document_BT, row_T, axis=1)
        seen = (document_BQ[:, :, None] == document_BT[:, None, :]) & (
            row_T[:, None] >= jnp.arange(T)[None]
        )[None]
        p = jax.nn.softmax(jnp.where(seen[:, None], score, -1e30), axis=-1)
        o_BTHV = jnp.einsum("BHTS,BSHV->BTHV", p.astype(v_BTHV.dtype), v_BTHV)
        return jnp.where((document_BQ > 0)[..., None, None], o_BTHV, 0)

    if T <= QUERY_BLOCK:
        return block(q_BTHK, jnp.arange(T))
    pad = -T % QUERY_BLOCK
    rows_NC = jnp.minimum(jnp.arange(T + pad), T - 1).reshape(-1, QUERY_BLOCK)
    q_NBCHK = jnp.moveaxis(jnp.take(q_BTHK, rows_NC, axis=1), 1, 0)
    o_NBCHV = jax.lax.map(lambda x: jax.checkpoint(block)(*x), (q_NBCHK, rows_NC))
    return jnp.moveaxis(o_NBCHV, 0, 1).reshape(B, T + pad, H, -1)[:, :T]


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
        w_o = param(self, "w_o", fan_in(H * K), (H, K, D), "heads value embed")
        q, k, v = (
            jnp.einsum("BTD,DHK->BTHK", x_BTD, w.astype(self.dtype)) for w in (w_q, w_k, w_v)
        )
        q, k = (rotate(x, positions_BT, c.rope_theta) for x in (q, k))
        o_BTHK = attend(q, k, v, document_BT)
        return jnp.einsum("BTHK,HKD->BTD", o_BTHK, w_o.astype(self.dtype))


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
        w_o = param(self, "w_o", fan_in(H * V), (H, V, D), "heads value embed")
        to = lambda w: w.astype(self.dtype)  # noqa: E731

        q_BTQ = RMSNorm(eps, name="q_norm")(jnp.einsum("BTD,DQ->BTQ", x_BTD, to(w_dq)))
        q_BTHK = jnp.einsum("BTQ,QHK->BTHK", q_BTQ, to(w_uq))
        c_BTR, shared_BTP = jnp.split(jnp.einsum("BTD,DR->BTR", x_BTD, to(w_dkv)), [R], axis=-1)
        c_BTR = RMSNorm(eps, name="kv_norm")(c_BTR)
        k_BTHN, v_BTHV = jnp.split(jnp.einsum("BTR,RHK->BTHK", c_BTR, to(w_ukv)), [N], axis=-1)
        k_BT1P = shared_BTP[:, :, None]
        if self.rotary:
            q_BTHN, q_BTHP = jnp.split(q_BTHK, [N], axis=-1)
            q_BTHP = rotate(q_BTHP, positions_BT, c.rope_theta)
            q_BTHK = jnp.concatenate([q_BTHN, q_BTHP], axis=-1)
            k_BT1P = rotate(k_BT1P, positions_BT, c.rope_theta)
        k_BTHP = jnp.broadcast_to(k_BT1P, (*k_BTHN.shape[:3], P))
        o_BTHV = attend(q_BTHK, jnp.concatenate([k_BTHN, k_BTHP], axis=-1), v_BTHV, document_BT)
        gate_BTHV = jax.nn.sigmoid(jnp.einsum("BTD,DHV->BTHV", x_BTD, to(w_gate)))
        return jnp.einsum("BTHV,HVD->BTD", gate_BTHV * o_BTHV, to(w_o))
