"""The gate that feeds the recurrence: g = g_min * sigmoid(exp(a_log) * (z + bias)).

g is the log of a token's decay, so every decay exp(g) lies in (exp(g_min), 1). That bound is what
lets chunked.py treat every 16-token tile, the diagonal ones too, as a plain matmul.
Source: arXiv 2607.24653, eq. 5 (g_min = -5). It is not a clamp of a softplus gate.
"""

import jax
import jax.numpy as jnp

LOWEST_G_MIN = -5.0  # 15 steps inside a tile then span 75 nats; f32 and bf16 overflow at 88.7
# exp(a_log) overflows f32 at 88.7, and inf * 0 is NaN in the gradient. From 40 on the sigmoid is a
# step (width e^-40) and the true gradient of a_log is 0; e^40 squared still fits a gradient norm.
_MAX_A_LOG = 40.0


def bounded_log_decay(
    z_BTHK: jax.Array, a_log_H: jax.Array, bias_HK: jax.Array, g_min: float = -5.0
) -> jax.Array:
    """Log decay per channel, f32 [B,T,H,K] in [g_min, 0], in nats per token.

    z_BTHK any float dtype; a_log_H and bias_HK parameters (f32). bias 0 gives g = g_min / 2, a
    state that is dead after one token: for an e-fold memory of tau tokens and a_log 0 set
    bias = logit(-1 / (g_min * tau)).
    Gradients are finite for any finite z, a_log and bias.
    Raises ValueError if g_min is outside [-5, 0), or shapes or dtypes do not fit.
    """
    if not isinstance(g_min, int | float) or not LOWEST_G_MIN <= g_min < 0:
        valid = -1e-3 if isinstance(g_min, int | float) and g_min >= 0 else LOWEST_G_MIN
        raise ValueError(
            f"bounded_log_decay: g_min={g_min} is no number in [-5, 0); below -5 the 16-token "
            f"tiles of the recurrence overflow. Nearest valid: {valid}"
        )
    for name, x in (("z", z_BTHK), ("a_log", a_log_H), ("bias", bias_HK)):
        kind = getattr(x, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            found = type(x).__name__ if kind is None else kind
            raise ValueError(f"bounded_log_decay: {name} is {found}; it must be an array of floats")
    if z_BTHK.ndim != 4:
        raise ValueError(f"bounded_log_decay: z has shape {z_BTHK.shape}; expected [B,T,H,K]")
    H, K = z_BTHK.shape[-2:]
    for name, x, shape in (("a_log", a_log_H, (H,)), ("bias", bias_HK, (H, K))):
        if x.shape != shape:
            raise ValueError(f"bounded_log_decay: {name} has shape {x.shape}; z needs {shape}")
    slope_H = jnp.exp(jnp.minimum(a_log_H.astype(jnp.float32), _MAX_A_LOG))
    shifted_BTHK = z_BTHK.astype(jnp.float32) + bias_HK.astype(jnp.float32)[None, None]
    return g_min * jax.nn.sigmoid(slope_H[None, None, :, None] * shifted_BTHK)
