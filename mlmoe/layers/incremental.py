"""Incremental attention: D (delta), A (additive) and S (slot read-out).

    q, k, v = SiLU(conv(W x)),  q and k L2-normalised,  g = g_min sigmoid(exp(a_log) (z + bias))
    z = W_up W_down x,  beta = beta_max sigmoid(W_b x)
    y = W_o [ sigmoid(W_g x) * RMSNorm_head( bounded_decay(q, k, v, g, beta) ) ]

The maths of the recurrence lives in `pallas_kernels/bounded_decay`; here are its parameters.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import Initializer

from mlmoe.config import IncrementalConfig, ModelConfig
from mlmoe.layers.conv import ShortConv
from mlmoe.layers.linear import project
from mlmoe.layers.norm import RMSNorm, l2_norm
from mlmoe.layers.param import OUT, fan_in, param, zeros
from mlmoe.sharding import per_shard
from pallas_kernels.bounded_decay import bounded_decay, bounded_log_decay, slot_attention


def memory_bias(config: IncrementalConfig) -> Initializer:
    """Gate bias [H, K] whose channels forget over memory_min to memory_max tokens, spread in log.

    A channel with g = -1/tau keeps 1/e after tau tokens, so bias = logit(1 / (-g_min tau)) at
    a_log = 0. A zero bias would mean g = g_min / 2: 8 % kept a token, a state dead at birth.
    """

    def init(
        key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None
    ) -> jax.Array:
        del key, out_sharding
        lo, hi = np.log(config.memory_min), np.log(config.memory_max)
        tau_HK = np.exp(np.linspace(lo, hi, math.prod(shape))).reshape(shape)
        p = 1.0 / (-config.g_min * tau_HK)
        return jnp.asarray(np.log(p / (1.0 - p)), dtype)

    return init


class Gate(nn.Module):
    """The bounded log-decay g [B, T, H, K] in float32, from a low-rank projection of x."""

    config: ModelConfig
    dtype: jnp.dtype
    width: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c, D = self.config.incremental, self.config.d_model
        H, K = c.heads, self.width
        w_down = param(self, "w_down", fan_in(D), (D, c.gate_rank), "embed rank")
        w_up = param(self, "w_up", fan_in(c.gate_rank), (c.gate_rank, H, K), "rank heads key")
        a_log_H = param(self, "a_log", zeros, (H,), "gate")
        bias_HK = param(self, "bias", memory_bias(c), (H, K), "gate gate")
        z_BTR = project("BTD,DR->BTR", x_BTD, w_down)
        z_BTHK = project("BTR,RHK->BTHK", z_BTR, w_up)
        return bounded_log_decay(z_BTHK.astype(jnp.float32), a_log_H, bias_HK, c.g_min)


class IncrementalAttention(nn.Module):
    """Layers D, A and S; `letter` says which update and read-out."""

    config: ModelConfig
    dtype: jnp.dtype
    letter: str

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, document_BT: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        del positions_BT  # order is carried by the decay
        c, D = self.config.incremental, self.config.d_model
        H, K, V = c.heads, c.key_dim, c.value_dim
        w_q = param(self, "w_q", fan_in(D), (D, H, K), "embed heads key")
        w_k = param(self, "w_k", fan_in(D), (D, H, K), "embed heads key")
        w_v = param(self, "w_v", fan_in(D), (D, H, V), "embed heads value")
        w_gate = param(self, "w_gate", fan_in(D), (D, H, V), "embed heads value")
        w_o = param(self, "w_o", fan_in(H * V, OUT), (H, V, D), "heads value embed")
        q, k, v, gate_BTHV = (project("BTD,DHK->BTHK", x_BTD, w) for w in (w_q, w_k, w_v, w_gate))
        q, k, v = (
            ShortConv(c.conv_width, name=f"conv_{n}")(y, document_BT)
            for n, y in (("q", q), ("k", k), ("v", v))
        )
        o_BTHV = self._mix(x_BTD, l2_norm(q), l2_norm(k), v, document_BT)
        o_BTHV = RMSNorm(self.config.norm_eps, name="o_norm")(o_BTHV)
        return project("BTHV,HVD->BTD", jax.nn.sigmoid(gate_BTHV) * o_BTHV, w_o)

    def _mix(
        self, x_BTD: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, document_BT: jax.Array
    ) -> jax.Array:
        c, D, H = self.config.incremental, self.config.d_model, self.config.incremental.heads
        width = c.slots if self.letter == "S" else c.key_dim
        g = Gate(self.config, self.dtype, width, name="decay")(x_BTD)
        if self.letter == "S":  # what a slot forgets is what it can be written
            s_BTHM = -jnp.expm1(g).astype(self.dtype)
            return _by_rows(slot_attention, document_BT, q, k, v, s_BTHM, g)
        if self.letter == "A":
            return _by_rows(bounded_decay, document_BT, q, k, v, g)
        w_beta = param(self, "w_beta", fan_in(D), (D, H), "embed heads")
        beta_BTH = c.beta_max * jax.nn.sigmoid(
            project("BTD,DH->BTH", x_BTD, w_beta).astype(jnp.float32)
        )
        return _by_rows(bounded_decay, document_BT, q, k, v, g, beta_BTH)


def _by_rows(op: Any, document_BT: jax.Array, *inputs: jax.Array) -> jax.Array:
    """The op's output, each device on its own rows: XLA cannot split a TPU kernel by itself."""
    run = lambda document_BT, *x: (op(*x, segment_ids=document_BT)[0], ())  # noqa: E731
    return per_shard(run, (document_BT, *inputs), ())[0]
