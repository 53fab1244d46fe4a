"""Reading the TPU compiler's schedule: what a compiled program does, bundle by bundle.

A TPU core issues one bundle of instructions a cycle. libtpu writes the final bundles of a kernel as
text (`aot.prepare(dump)`), loops marked by depth; cycles = bundles times trips. That leaves out
stalls on memory and between units beyond what the scheduler placed, clock changes, and everything
around the chip. So a time from here is a lower estimate of the truth, to be read with the byte
bound beside it: good for comparing two kernels, not for promising a speed.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pallas_kernels.aot import Chip

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:>\s*)*)\{")
_TRIPS = re.compile(r"scmp\.\w+\.[su]32\.\w+ %\w+, (\d+) /\* loop exit test")
_BOUNDS = re.compile(r"iteration_bounds: \(([^)]*)\)")
_PRODUCT = re.compile(r"= vmatmul\.[\w.]*?(f32|bf16|\w8)\b")
_VMEM = re.compile(r"#allocation\d+ \[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+)")
_GATHER = re.compile(r"%gather[\w.\-]* = (\w+)\[([\d,]*)\]\S* fusion\([^\n]*kind=kCustom")
_ROWS = {"f32": 8}  # operand rows of one vmatmul; 16 for two-byte types


class KernelCost(NamedTuple):
    """One Pallas kernel on one core."""

    name: str
    cycles: int  # all steps times their trips
    step_bundles: int  # bundles of one grid step (of the longest outermost loop)
    steps: int  # trips of that loop
    matrix_share: float  # of a grid step's cycles during which the matrix units stream rows
    spills: int  # vector registers stored for want of room, a grid step
    vmem: int  # bytes: windows, scratch and the slots of spilled registers


class _Bundle(NamedTuple):
    mark: str
    depth: int  # loops it is in
    text: str


class _Loop(NamedTuple):
    first: int
    last: int
    depth: int
    trips: int


def kernel_cost(name: str, dump: Path, chip: Chip, visits: int = 1) -> KernelCost:
    """The cost of the kernel `name` from the files in `dump`.

    A loop's step takes its bundles, or the rows its matrix units must stream where those are more.
    Both sides of a branch count.

    visits: the length to assume of a grid axis, or else of the outermost loop, where it is known
      only when the program runs.

    Raises:
      FileNotFoundError: the compiler wrote no schedule for it.
    """
    text = _newest(dump, f"*-{name}-*final_bundles.txt", "schedule-analysis").read_text()
    bundles = _bundles(text)
    loops = _loops(bundles, _grid_steps(text, visits), visits)

    def streaming(first: int, last: int) -> float:  # cycles that the operand rows take
        body = "".join(b.text for b in bundles[first : last + 1])
        rows = sum(_ROWS.get(kind, 16) for kind in _PRODUCT.findall(body))
        return rows / (chip.matrix_units * chip.rows_a_cycle)

    def cycles(first: int, last: int) -> int:  # of one pass, loops inside it counted once
        return max(last - first + 1, int(streaming(first, last)))

    total = cycles(0, len(bundles) - 1)
    for loop in loops:
        outer = [x for x in loops if x.first <= loop.first and loop.last <= x.last and x != loop]
        runs = math.prod(x.trips for x in outer)
        total += (loop.trips - 1) * runs * cycles(loop.first, loop.last)
    whole = _Loop(0, len(bundles) - 1, 0, 1)
    main = max((x for x in loops if x.depth == 1), key=lambda x: x.last - x.first, default=whole)
    body = "".join(b.text for b in bundles[main.first : main.last + 1])
    original = _newest(dump, f"*-{name}-*original.txt").read_text()
    slots = set(re.findall(r"vst \[vmem:\[(#allocation\d+_spill)\]", text))  # 4 KiB each
    return KernelCost(
        name=name,
        cycles=total,
        step_bundles=main.last - main.first + 1,
        steps=main.trips,
        matrix_share=streaming(main.first, main.last) / cycles(main.first, main.last),
        spills=len(re.findall(r"vst \[vmem:\[#allocation\d+_spill\]", body)),
        vmem=sum(int(size, 16) for size in _VMEM.findall(original)) + 4096 * len(slots),
    )


def _newest(dump: Path, pattern: str, without: str = "\0") -> Path:
    found = sorted(p for p in dump.glob(pattern) if without not in p.name)
    if not found:
        raise FileNotFoundError(f"the compiler wrote no {pattern} in {dump}")
    return found[-1]


def _bundles(text: str) -> list[_Bundle]:
    bundles: list[_Bundle] = []
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            # An empty bundle fills a branch's delay slot and carries no depth of its own.
            empty = line.rstrip().endswith("{}") and bundles
            depth = bundles[-1].depth if empty else found.group(2).count(">")
            bundles.append(_Bundle(found.group(1) or "", depth, line))
        elif bundles:
            bundles[-1] = bundles[-1]._replace(text=bundles[-1].text + line)
    return bundles


def _grid_steps(text: str, visits: int) -> int | None:
    """Grid steps of one core; an axis of unknown length is written as 2^31 - 1."""
    found = _BOUNDS.search(text)
    if not found:
        return None
    bounds = [int(bound) for bound in found.group(1).split(",")]
    return math.prod(visits if bound == 2**31 - 1 else bound for bound in bounds) or None


def _loops(bundles: list[_Bundle], grid: int | None, visits: int) -> list[_Loop]:
    """The loops, outer ones first; one whose length is not in the program counts as a single trip.

    A loop begins at its mark (LH header, LB body) and ends with the last bundle of its depth before
    another begins there: bundles of an outer level may be scheduled in between.
    """
    marks = [n for n, b in enumerate(bundles) if b.mark in ("LH", "LB") and b.depth > 0]
    heads = [n for n in marks if not _is_body_of_header(bundles, marks, n)]
    loops = []
    for n in heads:
        depth = bundles[n].depth
        stop = next((m for m in heads if m > n and bundles[m].depth <= depth), len(bundles))
        last = max(m for m in range(n, stop) if bundles[m].depth >= depth)
        found = _TRIPS.findall(" ".join(b.text for b in bundles[max(n, last - 24) : last + 1]))
        trips = int(found[-1]) if found else 1
        # The grid's loop is the outermost; two steps more fill and drain its copies.
        if depth == 1 and grid and trips == grid + 2:
            trips = grid
        if depth == 1 and not found:
            trips = max(grid or 1, visits)
        loops.append(_Loop(n, last, depth, trips))
    return loops


def _is_body_of_header(bundles: list[_Bundle], marks: list[int], n: int) -> bool:
    before = [m for m in marks if m < n]
    if bundles[n].mark != "LB" or not before:
        return False
    header = bundles[before[-1]]
    return header.mark == "LH" and header.depth == bundles[n].depth


def xla_cycles(hlo: str) -> int:
    """The compiler's own estimate for all operations but kernels, loop bodies times their trips."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            name = head.group(2)
            entry = name if head.group(1) else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def cycles(computation: str) -> int:
        total = 0
        for line in bodies.get(computation, []):
            loop = re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
            if loop:
                total += _while_trips(line, bodies[loop.group(1)]) * cycles(loop.group(2))
            else:
                total += sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', line)))
        return total

    return cycles(entry)


def _while_trips(line: str, condition: list[str]) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known.group(1))
    constants = re.findall(r"s32\[\][^ ]* constant\((\d+)\)", "\n".join(condition))
    return max(map(int, constants), default=1)


def gathered_bytes(hlo: str) -> int:
    """Read and written by gathers, of whose time the compiler gives no usable estimate."""
    total = 0
    for kind, shape in _GATHER.findall(hlo):
        total += 2 * (2 if kind == "bf16" else 4) * math.prod(int(n) for n in shape.split(",") if n)
    return total


def kernel_names(hlo: str) -> list[str]:
    """Names of the Pallas kernels in a compiled program, one for each call."""
    return [name for name, _ in _kernel_calls(hlo)]


def kernel_costs(
    hlo: str, dump: Path, chip: Chip, visits: Callable[[str], int] = lambda name: 1
) -> list[KernelCost]:
    """`kernel_cost` of every call; visits: from a kernel's name.

    Of equal kernels in one program the compiler may write a single schedule, under any name.
    """
    calls = _kernel_calls(hlo)
    costs = []
    for name, body in calls:
        equal = [other for other, text in calls if text == body]
        written = [x for x in (name, *equal) if any(dump.glob(f"*-{x}-*final_bundles.txt"))]
        cost = kernel_cost(written[0] if written else name, dump, chip, visits(name))
        costs.append(cost._replace(name=name))
    return costs


def _kernel_calls(hlo: str) -> list[tuple[str, str]]:
    """(name, what distinguishes the kernel) of each call."""
    calls = []
    for line in hlo.splitlines():
        found = re.search(r'%([\w.\-]+) = .*custom_call_target="tpu_custom_call"(.*)', line)
        if found:
            body = re.search(r'"body":"[^"]*"', found.group(2))
            shapes = re.search(r"operand_layout_constraints=\S.*?\}\},?", found.group(2))
            calls.append((found.group(1), f"{shapes and shapes.group()}{body and body.group()}"))
    return calls
