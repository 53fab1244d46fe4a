"""What libtpu wants to know from the environment on a machine without a TPU. Imports no JAX."""

import os
from pathlib import Path

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}


def describe_no_tpu() -> None:
    """Answers libtpu's questions where there is no TPU; call it before JAX looks for devices.

    Without that an installed libtpu asks the network and fills the terminal. Where there is a TPU
    this does nothing.
    """
    if any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*")):
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
