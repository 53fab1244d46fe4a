"""Checkpoints of a training run: saved in the background, checked by value when restored.

    save:     device arrays -> host copy (refused when not finite) -> the caller goes on;
              in the background: CRC-32 of the host copy, orbax writes it, manifest, rename
    restore:  manifest -> CRC-32 of every file -> names, shapes, dtypes -> orbax -> CRC-32 of arrays

Orbax 0.12.8 alone restores a flipped bit, casts a changed dtype and pads a changed shape without a
word, and takes an empty directory for the newest checkpoint: hence `mlmoe/manifest.py`, which also
draws the layout. The training loop is the one user.

Several processes (not tested here): all must see the same POSIX file system. Arrays that span
processes go to orbax as they are, without checksum or finiteness check; process 0 writes manifest
and meta; each process falls back on its own, so damage that only some can see ends in an error.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp  # 0.3 s on top of jax: no need to import it late
from jax.experimental import multihost_utils

from mlmoe import manifest
from mlmoe.errors import UserError


class Restored(NamedTuple):
    """What `Checkpoints.restore` found."""

    step: int
    state: Any
    data_state: dict[str, Any]
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints in `workdir/checkpoints`, of which the newest `keep` complete ones stay.

    A context manager: leaving it waits for the save in progress, which an interpreter that exits
    without `close` loses (Python then refuses orbax new threads); the older ones stay. One run
    writes a directory, any number may read it meanwhile: only saving deletes or cleans up anything.
    """

    def __init__(self, workdir: str | Path, *, keep: int):
        if "://" in str(workdir):
            raise UserError(f"workdir {workdir} is a URL; mount the bucket and give its directory")
        if keep < 1:
            raise UserError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.root = Path(workdir).absolute() / "checkpoints"
        self.keep = keep
        logging.getLogger("absl").addFilter(_no_orbax_traceback)
        _abandoned_write_is_quiet()
        self._orbax = ocp.StandardCheckpointer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def steps(self) -> list[int]:
        """The complete steps, ascending: every file there, of its size, the small ones intact."""
        return manifest.complete(self.root)

    def directories(self) -> list[int]:
        """Every step that has a directory, sound or not."""
        return manifest.directories(self.root)

    def sound(self, step: int) -> bool:
        """Whether every file of `step` is what was written; reads all of them."""
        try:
            manifest.read(self.root / str(step), read_arrays=True)
        except manifest.Damaged:
            return False
        return True

    def latest_meta(self) -> dict[str, Any] | None:
        """`meta` of the newest complete step, or None.

        Reads no array: `restore` may yet find that step damaged and fall back to an older one.
        """
        steps = self.steps()
        return manifest.read_json(self.root / str(steps[-1]) / manifest.META) if steps else None

    def save(
        self, step: int, state: Any, *, data_state: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        """Save `state` as `step` in the background, replacing that step once this is complete.

        Returns when the host holds a copy: the arrays may then be donated. `data_state` and `meta`
        are JSON dictionaries. First waits for the save before, and raises UserError when that one
        failed (call again to try this one); so does a float leaf that is not finite, unwritten.
        """
        self.wait()
        if step < 0:
            raise UserError(f"not saved: step is {step}; the first is 0")
        leaves = manifest.named_leaves(state)
        host = {name: _host_copy(name, leaf) for name, leaf in leaves.items()}
        texts = {manifest.data_file(): manifest.to_json("data_state", data_state)}
        if jax.process_index() == 0:
            texts[manifest.META] = manifest.to_json("meta", meta)
        staging = self.root / f"{step}.tmp"
        try:
            self._prepare(staging, texts)
            # Orbax refuses arrays without elements; the manifest holds all there is to know of one.
            self._orbax.save(staging / "state", {k: v for k, v in host.items() if v.size})
        except Exception as error:
            raise self._failure(step, staging, host, error) from error
        arrays = manifest.describe(leaves)
        self._pending = self._thread.submit(self._finish, step, staging, host, arrays)

    def _prepare(self, staging: Path, texts: dict[str, str]) -> None:
        if jax.process_index() == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            manifest.clean(self.root)
            staging.mkdir()
        multihost_utils.sync_global_devices("checkpoint staging")
        for name, text in texts.items():
            manifest.write_file(staging / name, text)

    def _finish(
        self, step: int, staging: Path, host: dict[str, Any], arrays: dict[str, Any]
    ) -> None:
        """In the background: checksums while orbax writes, then manifest, rename, old ones out."""
        try:
            for name, leaf in host.items():
                arrays[name]["crc32"] = manifest.array_crc(leaf)
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                manifest.write(staging, processes=jax.process_count(), arrays=arrays)
                manifest.discard(self.root / str(step))
                staging.rename(self.root / str(step))
        except Exception as error:
            raise self._failure(step, staging, host, error) from error
        if jax.process_index() == 0:
            self._prune(step)

    def _prune(self, saved: int) -> None:
        """Drop all that is older than the newest `keep` complete steps, except the one `saved`."""
        oldest_kept = self.steps()[-self.keep :][0]
        for step in manifest.directories(self.root):
            if step < oldest_kept and step != saved:
                manifest.discard(self.root / str(step))

    def _failure(
        self, step: int, staging: Path, host: dict[str, Any], error: Exception
    ) -> UserError:
        """The report on a failed save; frees what it had written."""
        free = shutil.disk_usage(next(p for p in staging.parents if p.exists())).free
        need = sum(leaf.nbytes for leaf in host.values())
        # Orbax raises at the first array that fails; those beside it may write a moment longer.
        for _ in range(20):
            shutil.rmtree(staging, ignore_errors=True)
            if not staging.exists():
                break
            time.sleep(0.05)
        return UserError(
            f"checkpoint {step} was not saved: {_first_line(error)}. It needs up to"
            f" {need / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB were free in {self.root}."
            f" Older checkpoints are intact: {_listing(self.steps())}"
        )

    def restore(
        self,
        abstract_state: Any,
        *,
        step: int | None = None,
        report: Callable[[str], None] = print,
    ) -> Restored | None:
        """The newest sound checkpoint, or `step`, on the shardings of `abstract_state`.

        `abstract_state` is a tree of jax.ShapeDtypeStruct (or of arrays), on any devices; a leaf
        without a sharding goes to the first one. `report` is told of each damaged checkpoint that
        is passed over. None when no sound one exists. Raises UserError when `step` is missing or
        damaged, and when a name, shape, dtype or the number of processes is not the saved one.
        """
        self.wait()
        if step is not None:
            try:
                return self._load(step, abstract_state)
            except manifest.Damaged as why:
                others = [s for s in self.steps() if s != step]
                raise UserError(
                    f"checkpoint {step} in {self.root} cannot be restored: {why}."
                    f" Other complete steps: {_listing(others)}"
                ) from why
        for candidate in reversed(manifest.directories(self.root)):
            try:
                return self._load(candidate, abstract_state)
            except manifest.Damaged as why:
                report(f"checkpoint {candidate} in {self.root} is damaged, skipped: {why}")
        return None

    def _load(self, step: int, abstract_state: Any) -> Restored:
        directory = self.root / str(step)
        if not directory.is_dir():
            raise manifest.Damaged("there is no such directory")
        body = manifest.read(directory, read_arrays=True)
        if body["processes"] != jax.process_count():
            raise UserError(
                f"checkpoint {directory} holds the data state of {body['processes']} processes,"
                f" this run has {jax.process_count()}; run it with {body['processes']}"
            )
        saved, wanted = body["arrays"], manifest.named_leaves(abstract_state)
        manifest.check_same(directory, saved, manifest.describe(wanted))
        arrays = self._read_arrays(directory / "state", wanted)
        for name, array in arrays.items():
            if saved[name]["crc32"] not in (None, manifest.array_crc(array)):
                raise manifest.Damaged(f"array {name} is not what was saved (checksum)")
        leaves = [_as_saved(arrays[name], saved[name]) for name in wanted]
        return Restored(
            step,
            jax.tree.unflatten(jax.tree.structure(abstract_state), leaves),
            manifest.read_json(directory / manifest.data_file()),
            manifest.read_json(directory / manifest.META),
        )

    def _read_arrays(self, directory: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        try:
            arrays = self._orbax.restore(directory, {k: t for k, t in targets.items() if t.size})
        except Exception as error:
            # Too little memory says nothing about the files, and an older one would not fit either.
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            raise manifest.Damaged(f"its arrays cannot be read: {_first_line(error)}") from error
        for name, target in targets.items():
            if not target.size:
                arrays[name] = jax.device_put(np.zeros(target.shape, target.dtype), target.sharding)
        return arrays

    def wait(self) -> None:
        """Until the save in progress is complete. Raises UserError, once, when it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then end the background threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except UserError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # the error that ended the run is the one to show


def _host_copy(name: str, leaf: jax.Array) -> Any:
    """A numpy copy that donation cannot touch; refused when a float in it is not finite."""
    raw = jax.random.key_data(leaf) if manifest.is_key(leaf) else leaf
    if not raw.is_fully_addressable:
        return raw
    host = np.array(raw)
    if jax.numpy.issubdtype(host.dtype, jax.numpy.floating):
        # Terms of a finite sum are finite: 20 GB/s. A sum may overflow; only then look at each.
        with np.errstate(all="ignore"):
            total = host.sum(dtype=np.promote_types(host.dtype, np.float32))
        if not np.isfinite(total) and (bad := int((~np.isfinite(host)).sum())):
            raise UserError(f"not saved: {name} is not finite ({bad} of {host.size} values)")
    return host


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """What orbax is to restore for `leaf`: the raw words of a random key, else the like of it."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    raw = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if manifest.is_key(leaf):
        raw = jax.eval_shape(jax.random.key_data, raw)
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=sharding)


def _as_saved(array: jax.Array, described: dict[str, Any]) -> jax.Array:
    impl = described.get("key_impl")
    return jax.random.wrap_key_data(array, impl=impl) if impl else array


def _listing(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _first_line(error: Exception) -> str:
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    # Tensorstore begins with what failed, ends with why, and puts long paths between.
    return line if len(line) < 240 else f"{line[:80]} ... {line[-150:]}"


def _no_orbax_traceback(record: logging.LogRecord) -> bool:
    """Orbax logs one failed write as 300 lines of tracebacks, and raises it: one message does."""
    return "orbax" not in record.pathname or not record.exc_info


def _abandoned_write_is_quiet() -> None:
    """A write that outlives its failed save finds orbax's loop closed: nobody waits for it."""
    if getattr(sys.unraisablehook, "__module__", None) == __name__:
        return
    shown = sys.unraisablehook

    def hook(event: Any) -> None:
        if "Event loop is closed" not in str(event.exc_value):
            shown(event)

    sys.unraisablehook = hook
