"""Every test runs on 8 simulated CPU devices; the count is fixed before JAX starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Most of the time of these tests is LLVM's: the programs are small and run once.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS]).strip()

import jax  # noqa: E402

# A missing axis must be an error, never a silent broadcast.
jax.config.update("jax_numpy_rank_promotion", "raise")
