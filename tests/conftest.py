"""Every test runs on 8 simulated CPU devices; the count is fixed before JAX starts."""

import os

from tests import quick_compiles

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = ("--xla_force_host_platform_device_count=8", *quick_compiles.FLAGS)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

import jax  # noqa: E402

# A missing axis must be an error, never a silent broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")
