"""The definition of the op: every expert runs on every token and a one-hot matrix picks.

    y_n = sum_a weights_na  expert_{experts_na}(x_n),   expert_e(x) = glu(w_in_e x) w_out_e

E / A times the work of `sorted`, plain autodiff, no index arithmetic: the oracle of other paths.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.expert_dispatch.activations import glu


def expert_ffn(
    x_NR: jax.Array,
    experts_NA: jax.Array,
    weights_NA: jax.Array,
    w_in_EPRF: jax.Array,
    w_out_EFR: jax.Array,
    activation: str,
) -> jax.Array:
    """As `op.expert_ffn`, whose arguments these are, already checked."""
    experts = w_in_EPRF.shape[0]
    real_NA = (experts_NA >= 0) & (experts_NA < experts)
    row_N1 = real_NA.any(axis=1, keepdims=True)
    # `where` and not a multiplication: padding rows may hold NaN, and 0 * NaN is NaN, here in the
    # outputs and again in every weight's gradient.
    x_NR = jnp.where(row_N1, x_NR, 0)
    weights_NA = jnp.where(real_NA, weights_NA.astype(jnp.float32), 0)
    chosen_NAE = jax.nn.one_hot(experts_NA, experts)  # a row of zeros where no such expert exists
    combine_NE = jnp.einsum("NAE,NA->NE", chosen_NAE, weights_NA)

    hidden_PENF = jnp.einsum("NR,EPRF->PENF", x_NR, w_in_EPRF)
    out_ENR = jnp.einsum("ENF,EFR->ENR", glu(hidden_PENF, activation), w_out_EFR)
    # An expert that a token did not choose may hold NaN too.
    chosen_EN1 = jnp.any(chosen_NAE > 0, axis=1).T[..., None]
    out_ENR = jnp.where(chosen_EN1, out_ENR.astype(jnp.float32), 0)
    y_NR = jnp.einsum("ENR,NE->NR", out_ENR, combine_NE)
    return jnp.where(row_N1, y_NR, 0).astype(x_NR.dtype)
