"""XLA options that halve the time of these tests: their programs are small, and most run once."""

import importlib.metadata

# Most of what is left is LLVM's.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
# The emitters of fusions make up to half of the compile time; jaxlib 0.12 has no such option.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
