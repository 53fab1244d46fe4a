"""Compiling for a TPU that is not here: the real compiler (libtpu, extra `[plan]`), on a CPU.

It proves that a program lowers and fits, and shows how it is scheduled. It says nothing about
numbers, and about time only what a schedule says (see schedule.py).
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from pallas_kernels.libtpu import describe_no_tpu


class Chip(NamedTuple):
    """Public figures of one chip. Times in seconds, sizes in bytes, rates a second."""

    topology: str
    cores: int  # that a kernel's parallel grid axes are split over
    matrix_units: int  # a core's
    rows_a_cycle: int  # that a matrix unit takes in, bf16
    clock: float
    peak_flops: float  # bf16
    hbm_rate: float


CHIPS = {
    "v5p": Chip("v5p:2x2x1", 2, 4, 1, 1.75e9, 459e12, 2.765e12),
    "v6e": Chip("v6e:2x2", 1, 2, 2, 1.75e9, 918e12, 1.64e12),
}


class Collective(NamedTuple):
    """One array that a collective of a compiled program makes on each chip."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    line: str  # of the program: replica groups and so on

    @property
    def bytes(self) -> int:
        """Without the padding of tiles."""
        bits = int(re.sub(r"\D*(\d+).*", r"\1", self.dtype)) if self.dtype != "pred" else 8
        return math.prod(self.shape) * bits // 8


_COLLECTIVE = re.compile(
    r" = (.*?) (ragged-all-to-all|all-to-all|all-gather|all-reduce|reduce-scatter"
    r"|collective-permute)(-done)?\("
)


def collectives(text: str) -> list[Collective]:
    """Those in a program's text (`compiled.as_text()`), in its order; one per result array."""
    found = []
    for line in text.splitlines():
        if hit := _COLLECTIVE.search(line):
            for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", hit[1]):
                shape = tuple(int(d) for d in dims.split(",") if d)
                found.append(Collective(hit[2], dtype, shape, line.strip()))
    return found


class MissingCompiler(RuntimeError):
    """libtpu is not installed."""


def prepare(dump: Path | None = None) -> None:
    """Sets what libtpu reads from the environment; call it before the first `mesh`.

    dump: a folder for the schedules of everything this process compiles for TPU from then on.
    """
    describe_no_tpu()
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        flags = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=(original|final|schedule).*"
        )
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()


def devices(chip: str, topology: str | None = None) -> list[jax.Device]:
    """Described chips: those of the smallest slice, or of a topology such as `v5p:4x4x4`.

    Raises:
      ValueError: no such chip.
      MissingCompiler: libtpu is not installed.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is unknown; choose one of {', '.join(CHIPS)}")
    try:
        import libtpu  # noqa: F401
    except ImportError as e:
        raise MissingCompiler(
            "the TPU compiler is not installed: pip install 'mlmoe[plan]' (Linux only)"
        ) from e
    prepare()
    name = topology or CHIPS[chip].topology
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


def mesh(chip: str) -> Mesh:
    """One described chip of that kind, as a mesh. Raises what `devices` does."""
    return Mesh(devices(chip)[:1], ("data",), axis_types=(AxisType.Auto,))


def compile_for(chip: str, f: Callable[..., Any], *args: Any) -> Any:
    """The compiled f for one chip; args are (pytrees of) jax.ShapeDtypeStruct."""
    on = mesh(chip)
    where = SingleDeviceSharding(on.devices.flat[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
    with jax.set_mesh(on):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).compile()
