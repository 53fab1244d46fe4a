"""The dense channel mixer: y = W_out glu(W_in x). Also the shared expert of the LatentMoE."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.layers.linear import project
from mlmoe.layers.param import OUT, fan_in, param
from pallas_kernels.expert_dispatch.activations import PARTS, glu


class MLP(nn.Module):
    """Gated MLP over the last axis of x [B, T, D]; `activation` as in `expert_dispatch`."""

    hidden: int
    activation: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        D, F, P = x_BTD.shape[-1], self.hidden, PARTS[self.activation]
        w_in = param(self, "w_in", fan_in(D), (P, D, F), "part embed hidden")
        w_out = param(self, "w_out", fan_in(F, OUT), (F, D), "hidden embed")
        z_PBTF = [project("BTD,DF->BTF", x_BTD, w) for w in w_in]
        h_BTF = glu(z_PBTF, self.activation)
        self.sow("measured", "largest_h", jnp.max(jnp.abs(h_BTF)))  # nothing, unless asked for
        return project("BTF,FD->BTD", h_BTF, w_out)
