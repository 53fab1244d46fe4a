"""One layer: a token mixer and a channel mixer, joined by the configured residual.

    running += mixer(norm(read(...)))        running += channel(norm(read(...)))

`read` is the running sum itself, or a softmax over depth for block residuals.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.layers.attention import FullAttention, Latent, LatentAttention
from mlmoe.layers.incremental import IncrementalAttention
from mlmoe.layers.latent_moe import LatentMoE
from mlmoe.layers.mlp import MLP
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.residual import DepthRead, WindowSum
from mlmoe.layers.router import RouterStats, Routing
from mlmoe.layout import LATENT


class LayerSpec(NamedTuple):
    """What distinguishes a layer from its neighbours; equal specs can share one scanned body."""

    letter: str
    dense: bool
    starts_block: bool  # its mixer reads completed blocks only: the running sum is still empty
    follows: bool  # reads the latent of the latent layer before it


class Stream(NamedTuple):
    """What flows from layer to layer."""

    running_BTD: jax.Array  # sum of sublayer outputs; since the block's start for block residuals
    window: tuple[jax.Array, ...]  # the last mixer outputs [B, T, D], for window residuals
    latent: Latent | None  # of the last latent layer that made one; None unless they are shared


def make_mixer(config: ModelConfig, dtype: jnp.dtype, letter: str) -> nn.Module:
    """The token mixer of a layout letter; all take (x, document, positions), latent ones more."""
    if letter == "F":
        return FullAttention(config, dtype, name="mixer")
    if letter in LATENT:
        return LatentAttention(config, dtype, letter, name="mixer")
    return IncrementalAttention(config, dtype, letter, name="mixer")


class Layer(nn.Module):
    """One layer of the stack; `sources` are the completed blocks (empty unless block residual)."""

    config: ModelConfig
    dtype: jnp.dtype
    spec: LayerSpec

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        sources: tuple[jax.Array, ...],
        document_BT: jax.Array,
        positions_BT: jax.Array,
        routing: Routing | None,
    ) -> tuple[Stream, RouterStats | None]:
        c, eps = self.config, self.config.norm_eps
        running_BTD, window, latent = stream
        empty = self.spec.starts_block
        x_BTD = self._read("mixer_read", sources, None if empty else running_BTD)
        mixer = make_mixer(c, self.dtype, self.spec.letter)
        inputs = (RMSNorm(eps, name="mixer_norm")(x_BTD), document_BT, positions_BT)
        if self.spec.letter in LATENT:
            a_BTD, made = mixer(*inputs, latent if self.spec.follows else None)
            latent = None if latent is None else made
        else:
            a_BTD = mixer(*inputs)
        running_BTD = a_BTD if empty else running_BTD + a_BTD
        if window:
            running_BTD = running_BTD + WindowSum(self.dtype, name="window")(window)
            window = (*window[1:], a_BTD)

        y_BTD = self._read("channel_read", sources, running_BTD)
        y_BTD = RMSNorm(eps, name="channel_norm")(y_BTD)
        if self.spec.dense:
            mlp = MLP(c.moe.dense_hidden, c.moe.activation, self.dtype, name="channel")
            return Stream(running_BTD + mlp(y_BTD), window, latent), None
        assert routing is not None
        moe = LatentMoE(c, self.dtype, name="channel")
        m_BTD, stats = moe(y_BTD, document_BT, routing)
        return Stream(running_BTD + m_BTD, window, latent), stats

    def _read(
        self, name: str, sources: tuple[jax.Array, ...], running_BTD: jax.Array | None
    ) -> jax.Array:
        parts = sources if running_BTD is None else (*sources, running_BTD)
        if self.config.residual.kind != "block":
            return parts[-1]
        return DepthRead(self.config.norm_eps, name=name)(parts)
