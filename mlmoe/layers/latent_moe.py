"""Stable LatentMoE: many small experts in a latent space, router and shared expert at full width.

    y = shared(x) + W_up RMSNorm( sum_a p_a expert_a(W_down x) )

The norm before W_up keeps the scale of the sum from drifting (arXiv 2607.24653). Only the latent
width R is ever sent to experts, so their traffic and bytes shrink by D / R. Where the mesh has an
expert axis, each of its shards holds E/S experts (expert_parallel.py).
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig, MoEConfig
from mlmoe.layers.expert_parallel import expert_parallel_ffn
from mlmoe.layers.linear import project
from mlmoe.layers.mlp import MLP
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import OUT, fan_in, param, zeros
from mlmoe.layers.router import RouterStats, Routing, route
from mlmoe.sharding import EXPERT, expert_shards, per_shard
from pallas_kernels.expert_dispatch import expert_ffn
from pallas_kernels.expert_dispatch.activations import PARTS
from pallas_kernels.platform import on_tpu


def route_and_run(
    config: MoEConfig,
    logits_BTE: jax.Array,
    z_BTR: jax.Array,
    document_BT: jax.Array,
    routing: Routing,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
) -> tuple[jax.Array, RouterStats]:
    """sum_a p_a expert_a(z) [B, T, R] of the tokens of one shard, and what its router did."""
    experts_NA, p_NA, stats = route(config, routing, logits_BTE, document_BT > 0)
    z_NR = z_BTR.reshape(-1, z_BTR.shape[-1])
    args = (z_NR, experts_NA, p_NA, w_in_EPRF, w_out_EFR)
    if expert_shards() == 1:
        return expert_ffn(*args, activation=config.activation).reshape(z_BTR.shape), stats
    transport = config.transport
    if transport == "auto":
        transport = "ragged" if on_tpu() else "gather"
    u_NR, unsent = expert_parallel_ffn(
        *args,
        activation=config.activation,
        axis=EXPERT,
        transport=transport,
        buffer=config.buffer,
    )
    return u_NR.reshape(z_BTR.shape), stats._replace(unsent=unsent)


class LatentMoE(nn.Module):
    """x [B, T, D], document [B, T], one layer's routing -> (y [B, T, D], RouterStats).

    A learned temperature is a parameter on top of the scheduled one: T exp(log_temperature).
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, document_BT: jax.Array, routing: Routing
    ) -> tuple[jax.Array, RouterStats]:
        c, D = self.config.moe, self.config.d_model
        E, R, F, P = c.experts, c.latent, c.hidden, PARTS[c.activation]
        w_router = param(self, "w_router", fan_in(D), (D, E), "embed score")
        w_down = param(self, "w_down", fan_in(D), (D, R), "embed latent")
        w_up = param(self, "w_up", fan_in(R, OUT), (R, D), "latent embed")
        w_in = param(self, "w_in", fan_in(R), (E, P, R, F), "expert part latent hidden")
        w_out = param(self, "w_out", fan_in(F), (E, F, R), "expert hidden latent")

        if c.temperature_learned:
            log_temperature = param(self, "log_temperature", zeros, (), "")
            routing = routing._replace(temperature=routing.temperature * jnp.exp(log_temperature))
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD.astype(jnp.float32), w_router)
        z_BTR = project("BTD,DR->BTR", x_BTD, w_down)
        experts = (w_in.astype(self.dtype), w_out.astype(self.dtype))
        u_BTR, stats = per_shard(
            functools.partial(route_and_run, c),
            (logits_BTE, z_BTR, document_BT),
            (routing,),
            experts,
        )
        u_BTR = RMSNorm(self.config.norm_eps, name="latent_norm")(u_BTR)
        shared_BTD = MLP(c.shared_hidden, c.activation, self.dtype, name="shared")(x_BTD)
        return shared_BTD + project("BTR,RD->BTD", u_BTR, w_up), stats
