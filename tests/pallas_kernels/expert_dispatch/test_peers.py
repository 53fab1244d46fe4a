"""The library products that `bench` measures beside ours compute the same thing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.expert_dispatch import peers, ref
from pallas_kernels.expert_dispatch.sorted import expert_ffn


def test_megablox_equals_ref():
    """Widths and rows as the libraries' tiles need them; one expert without rows."""
    rng = np.random.default_rng(0)
    N, E, R, F = 512, 3, 128, 128
    experts_NA = jnp.asarray(rng.integers(0, 2, size=(N, 1)), jnp.int32)
    shapes = (N, R), (N, 1), (E, 2, R, F), (E, F, R), (N, R)
    *floats, dy_NR = (jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5, jnp.float32) for s in shapes)

    def run(f, *products):
        def call(x_NR, weights_NA, *matrices):
            return f(x_NR, experts_NA, weights_NA, *matrices, "capped", *products)

        y_NR, pull = jax.vjp(call, *floats)
        return y_NR, *pull(dy_NR)

    with pltpu.force_tpu_interpret_mode():
        found = jax.jit(lambda: run(expert_ffn, peers.Megablox))()
    for got, want in zip(found, jax.jit(lambda: run(ref.expert_ffn))(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * float(jnp.abs(want).max()))
