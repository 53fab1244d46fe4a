"""Reference values in float64, one .npz a mechanism, as float32 arrays where they are floats."""

from pathlib import Path

import numpy as np


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of tests/golden/<name>.npz."""
    with np.load(Path(__file__).parent / f"{name}.npz") as file:
        return {k: _narrow(file[k]) for k in file.files}


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == np.float64 else x
