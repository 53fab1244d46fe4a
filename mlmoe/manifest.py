"""What makes a step directory a checkpoint: a manifest of its arrays and files, written last.

    checkpoints/<step>/
        manifest.json               written last; carries its own CRC-32
        meta.json                   configuration and data fingerprint
        data/process_0-of-1.json    state of the data iterator, one file a process
        state/                      the arrays, by orbax: one for every leaf, flat, named by its
                                    path with dots between, so `params.*` can be read alone

Everything is assembled in `<step>.tmp`, which is renamed to `<step>` once the manifest is inside:
a kill at any moment leaves either a complete step or a `.tmp` that nothing reads. This file knows
names, shapes, checksums and files; its one user, `mlmoe/checkpoint.py`, moves the values.
"""

import difflib
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mlmoe.errors import UserError

NAME = "manifest.json"
META = "meta.json"
_STALE = re.compile(r"\d+\.(tmp|old|orbax-checkpoint-tmp.*)")


class Damaged(Exception):
    """A step directory that is no sound checkpoint; the message says why."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path in flattening order: 'params.embed.kernel', 'opt_state.0.mu.embed.kernel'."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise UserError(f"state leaf {name} is {leaf!r}, a {type(leaf).__name__}, no jax.Array")
        if name in named:
            raise UserError(f"two leaves of the state are named {name}; rename one")
        named[name] = leaf
    return named


def is_key(leaf: Any) -> bool:
    """Whether the leaf holds typed random keys, which files know only as their raw words."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(leaves: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the manifest says of every leaf before its checksum is known."""
    described: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        described[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        if isinstance(leaf, jax.Array) and is_key(leaf):
            described[name]["key_impl"] = jax.random.key_impl(leaf)
    return described


def check_same(directory: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UserError unless both descriptions have the same names, shapes and dtypes."""
    for name in wanted:
        if name not in saved:
            near = difflib.get_close_matches(name, saved, n=1, cutoff=0) or ["none"]
            raise UserError(f"checkpoint {directory} has no leaf {name}; the nearest is {near[0]}")
    for name, have in saved.items():
        if name not in wanted:
            raise UserError(f"checkpoint {directory} has a leaf {name}; the state to fill has not")
        ask = wanted[name]
        if (have["shape"], have["dtype"]) != (ask["shape"], ask["dtype"]):
            raise UserError(
                f"checkpoint {directory}: leaf {name} is {have['dtype']}{have['shape']} there and"
                f" {ask['dtype']}{ask['shape']} in the state to fill"
            )


def array_crc(array: Any) -> int | None:
    """CRC-32 of the values in row-major order, or None for an array that spans processes."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return zlib.crc32(np.asarray(array).reshape(-1).view(np.uint8).data)


def data_file() -> str:
    """Name, inside a step directory, of the iterator state of this process."""
    return f"data/process_{jax.process_index()}-of-{jax.process_count()}.json"


def to_json(what: str, value: dict[str, Any]) -> str:
    """`value` as text; raises UserError, with `what` it is, when JSON cannot hold it."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"not saved: {what} is not JSON ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A file of which `read` has checked the checksum."""
    return json.loads(path.read_text())


def write_file(path: Path, text: str) -> None:
    """Write `text`, and return once it is on the disk, not only in the page cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write(directory: Path, *, processes: int, arrays: dict[str, Any]) -> None:
    """Seal `directory`: record size and CRC-32 of every file, and what `arrays` says of the values.

    Those values have checksums of their own, taken before they were written; the files are read
    back from the page cache (3 GB/s). With several processes that would be the whole model through
    one of them: array files are then recorded by size alone.
    """
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = path.relative_to(directory).as_posix()
        skip = processes > 1 and _is_array(name)
        files[name] = [path.stat().st_size, None if skip else _file_crc(path)]
    body = {"processes": processes, "arrays": arrays, "files": files}
    write_file(directory / NAME, json.dumps({"crc32": _body_crc(body), "body": body}))


def read(directory: Path, *, read_arrays: bool) -> dict[str, Any]:
    """The manifest's body, after checking the recorded files. Raises Damaged.

    Sizes are always checked, checksums of array files only where `read_arrays` allows the time.
    """
    try:
        body = _read_body(directory)
        for name, (size, crc) in body["files"].items():
            found = (directory / name).stat().st_size
            if found != size:
                raise Damaged(f"{name} has {found} bytes, {size} were written")
            check = crc is not None and (read_arrays or not _is_array(name))
            if check and _file_crc(directory / name) != crc:
                raise Damaged(f"{name} is not what was written (checksum)")
    except FileNotFoundError as error:
        raise Damaged(f"{Path(error.filename).relative_to(directory)} is missing") from error
    except OSError as error:
        raise Damaged(f"it cannot be read: {error}") from error
    return body


def _is_array(name: str) -> bool:
    return name.startswith("state/")


def _file_crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _read_body(directory: Path) -> dict[str, Any]:
    text = (directory / NAME).read_bytes()
    try:
        outer = json.loads(text)
        body, crc = outer["body"], outer["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{NAME} is no manifest ({type(error).__name__})") from error
    if crc != _body_crc(body):
        raise Damaged(f"{NAME} is not what was written (checksum)")
    return body


def _body_crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def directories(root: Path) -> list[int]:
    """Every step number that has a directory, sound or not, ascending."""
    if not root.is_dir():
        return []
    names = (p.name for p in root.iterdir() if p.is_dir() and p.name.isdecimal())
    # '007' is nobody's checkpoint: step 7 lives in '7'.
    return sorted(int(name) for name in names if str(int(name)) == name)


def complete(root: Path) -> list[int]:
    """The steps whose manifest and files agree, ascending."""
    steps = []
    for step in directories(root):
        try:
            read(root / str(step), read_arrays=False)
        except Damaged:
            continue
        steps.append(step)
    return steps


def discard(directory: Path) -> None:
    """Delete a step in two moves: a half-deleted one must not look like a checkpoint."""
    if directory.exists():
        old = directory.with_name(f"{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what killed saves and deletions left. Only for a writer that is between two saves."""
    for path in root.iterdir():
        if _STALE.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
