"""Every test runs on 8 simulated CPU devices; the count is fixed before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402

# A missing axis must be an error, never a silent broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")
