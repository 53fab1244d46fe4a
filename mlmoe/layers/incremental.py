"""Incremental attention: D (delta), A (additive) and S (slot read-out).

    q, k, v = SiLU(conv(W x)),  q and k L2-normalised,  g = g_min sigmoid(exp(a_log) (z + bias))
    z = W_up W_down x,  beta = beta_max sigmoid(W_b x)
    y = W_o [ sigmoid(W_g x) * RMSNorm_head( bounded_decay(q, k, v, g, beta) ) ]

The maths of the recurrence lives in `pallas_kernels/bounded_decay`; here are its parameters.
"""

import math
from typing import Any, NamedTuple

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
from mlmoe.layers.sample import COLLECTION, take_sample
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


class Carried(NamedTuple):
    """What a layer hands from one piece of a sequence to the next; its size does not grow."""

    history: tuple[Any, ...]  # the convolutions' last inputs, q, k, v: [B, width - 1, H, K]
    state: Any  # of the recurrence, float32: [B, H, K, V]; S: [B, H, M, K] and [B, H, M, V]


def first_carried(config: ModelConfig, dtype: jnp.dtype, letter: str, rows: int) -> Carried:
    """What is carried before the first token."""
    c, B = config.incremental, rows
    H, J, K, V, M = c.heads, c.conv_width - 1, c.key_dim, c.value_dim, c.slots
    shapes = [(H, M, K), (H, M, V)] if letter == "S" else [(H, K, V)]
    state = tuple(jnp.zeros((B, *shape), jnp.float32) for shape in shapes)
    history = tuple(jnp.zeros((B, J, H, width), dtype) for width in (K, K, V))
    return Carried(history, state if letter == "S" else state[0])


class IncrementalAttention(nn.Module):
    """Layers D, A and S; `letter` says which update and read-out."""

    config: ModelConfig
    dtype: jnp.dtype
    letter: str

    def __call__(
        self, x_BTD: jax.Array, document_BT: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        """Whole rows, as in training."""
        del positions_BT  # order is carried by the decay
        return self._run(x_BTD, document_BT, None)[0]

    def extend(
        self, x_BTD: jax.Array, document_BT: jax.Array, carried: Carried
    ) -> tuple[jax.Array, Carried]:
        """The next piece of rows, of any length; their first document continues `carried`."""
        return self._run(x_BTD, document_BT, carried)

    @nn.compact
    def _run(self, x_BTD: jax.Array, document_BT: jax.Array, carried: Carried | None) -> Any:
        c, D = self.config.incremental, self.config.d_model
        H, K, V = c.heads, c.key_dim, c.value_dim
        w_q = param(self, "w_q", fan_in(D), (D, H, K), "embed heads key")
        w_k = param(self, "w_k", fan_in(D), (D, H, K), "embed heads key")
        w_v = param(self, "w_v", fan_in(D), (D, H, V), "embed heads value")
        w_gate = param(self, "w_gate", fan_in(D), (D, H, V), "embed heads value")
        w_o = param(self, "w_o", fan_in(H * V, OUT), (H, V, D), "heads value embed")
        q, k, v, gate_BTHV = (project("BTD,DHK->BTHK", x_BTD, w) for w in (w_q, w_k, w_v, w_gate))
        before = {} if carried is None else dict(zip("qkv", carried.history, strict=True))
        (q, after_q), (k, after_k), (v, after_v) = (
            ShortConv(c.conv_width, name=f"conv_{n}")(y, document_BT, before.get(n))
            for n, y in (("q", q), ("k", k), ("v", v))
        )
        state = None if carried is None else carried.state
        o_BTHV, state = self._mix(x_BTD, l2_norm(q), l2_norm(k), v, document_BT, state)
        o_BTHV = RMSNorm(self.config.norm_eps, name="o_norm")(o_BTHV)
        y_BTD = project("BTHV,HVD->BTD", jax.nn.sigmoid(gate_BTHV) * o_BTHV, w_o)
        return y_BTD, None if carried is None else Carried((after_q, after_k, after_v), state)

    def _mix(
        self,
        x_BTD: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        document_BT: jax.Array,
        state: Any,
    ) -> tuple[jax.Array, Any]:
        """The recurrence: its outputs, and its last state if it began with one."""
        c, D, H = self.config.incremental, self.config.d_model, self.config.incremental.heads
        width = c.slots if self.letter == "S" else c.key_dim
        g = Gate(self.config, self.dtype, width, name="decay")(x_BTD)
        op: Any = bounded_decay
        inputs: tuple[jax.Array, ...] = (q, k, v, g)
        if self.letter == "S":  # what a slot forgets is what it can be written
            op, inputs = slot_attention, (q, k, v, -jnp.expm1(g).astype(self.dtype), g)
        elif self.letter == "D":
            w_beta = param(self, "w_beta", fan_in(D), (D, H), "embed heads")
            beta_BTH = c.beta_max * jax.nn.sigmoid(
                project("BTD,DH->BTH", x_BTD, w_beta).astype(jnp.float32)
            )
            inputs = (*inputs, beta_BTH)
        asked = self.is_mutable_collection(COLLECTION) and not self.is_initializing()
        o_BTHV, end = _by_rows(op, document_BT, inputs, state, asked or state is not None)
        if asked:
            self.sow(COLLECTION, "sample", take_sample(document_BT, inputs, g, o_BTHV, end))
        return o_BTHV, end


def _by_rows(op: Any, document_BT: jax.Array, inputs: Any, state: Any, keep: bool) -> Any:
    """The op's output and, if kept, its last state, each device on its own rows.

    XLA cannot split a TPU kernel by itself.
    """

    def run(document_BT: jax.Array, state: Any, *inputs: jax.Array) -> Any:
        o_BTHV, end = op(*inputs, initial_state=state, segment_ids=document_BT)
        return (o_BTHV, end if keep else None), ()

    return per_shard(run, (document_BT, state, *inputs), ())[0]
