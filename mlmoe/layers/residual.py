"""What joins layers beyond the plain sum: attention residuals across depth.

`block`: a sublayer reads h = sum_s softmax_s(w . RMSNorm(src_s)) src_s over the embedding, the sums
of completed blocks and the running sum (arXiv 2603.15031). w starts at zero: a plain mean.
`window`: a mixer's output gains sum_i Proj_i(H_i) over the mixer outputs of the k layers before,
with every Proj_i zero at the start, so switching it on does not move the loss.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.layers.linear import project
from mlmoe.layers.norm import rms_norm
from mlmoe.layers.param import ones, param, zeros


def depth_softmax(
    sources: Sequence[jax.Array], w_D: jax.Array, gain_D: jax.Array, eps: float
) -> jax.Array:
    """sum_s softmax_s(w . RMSNorm(src_s)) src_s; sources [..., D]; scores in float32."""
    score = jnp.stack(
        [
            jnp.einsum("...D,D->...", rms_norm(x.astype(jnp.float32), gain_D, eps), w_D)
            for x in sources
        ]
    )
    p = jax.nn.softmax(score, axis=0).astype(sources[0].dtype)
    return sum(p[i][..., None] * x for i, x in enumerate(sources))  # type: ignore[return-value]


class DepthRead(nn.Module):
    """`depth_softmax` with its learned query and gain."""

    eps: float

    @nn.compact
    def __call__(self, sources: Sequence[jax.Array]) -> jax.Array:
        D = sources[0].shape[-1]
        w_D = param(self, "w", zeros, (D,), "norm")
        gain_D = param(self, "gain", ones, (D,), "norm")
        return depth_softmax(sources, w_D, gain_D, self.eps)


class WindowSum(nn.Module):
    """sum_i Proj_i(H_i) over the outputs of earlier mixers, newest last; zero at the start."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, outputs: Sequence[jax.Array]) -> jax.Array:
        D, k = outputs[0].shape[-1], len(outputs)
        w_proj = param(self, "w_proj", zeros, (k, D, D), "part embed embed")
        h_kBTD = jnp.stack(outputs)
        return project("kBTD,kDE->BTE", h_kBTD, w_proj)
