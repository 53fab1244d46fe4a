"""Which machine a function is being traced for."""

import jax


def on_tpu() -> bool:
    """Whether the code being traced will run on a TPU.

    The mesh of `jax.set_mesh` decides, also when its devices are only described (ahead-of-time
    compilation for a chip that is not here); without one, JAX's default backend does.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return "TPU" in device.device_kind
    return jax.default_backend() == "tpu"
