"""Checkpoints under damage, kills and full disks: the newest sound one comes back, exactly."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mlmoe.checkpoint import Checkpoints, Restored
from mlmoe.errors import UserError

ROOT = Path(__file__).parents[2]
META = {"config": {"lr": 1e-3}, "fingerprint": "abc"}


def make_state(seed: int, size: int = 4096) -> dict[str, jax.Array]:
    """Noise, which does not compress, and leaves that do: bf16 ones, zeros, a counter."""
    return {
        "w": jax.random.normal(jax.random.key(seed), (size,)),
        "scale": jnp.full((64,), seed, jnp.bfloat16),
        "zero": jnp.zeros((32, 32)),
        "n": jnp.int32(seed),
    }


def save_steps(workdir: Path, *steps: int) -> None:
    with Checkpoints(workdir, keep=9) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), data_state={"row": step}, meta=META)


def restore(workdir: Path) -> tuple[Restored, list[str]]:
    """The checkpoint that comes back, after comparing it bit for bit, and what was told."""
    told: list[str] = []
    with Checkpoints(workdir, keep=9) as checkpoints:
        found = checkpoints.restore(make_state(0), report=told.append)
    assert found is not None
    for got, want in zip(
        jax.tree.leaves(found.state), jax.tree.leaves(make_state(found.step)), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    assert found.data_state == {"row": found.step}
    return found, told


def array_files(step_dir: Path) -> list[Path]:
    return sorted(p for p in (step_dir / "state").rglob("*") if p.is_file())


def test_one_flipped_bit_in_any_file(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    files = [p for p in (tmp_path / "checkpoints/2").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in array_files(tmp_path / "checkpoints/2")) > 4 * 4000
    rng = random.Random(0)
    for file in files:
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        found, told = restore(tmp_path)
        assert found.step == 1
        assert len(told) == 1 and "checkpoint 2" in told[0] and file.name in told[0]
        file.write_bytes(data)
    assert restore(tmp_path)[0].step == 2


def test_values_are_checked_not_only_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What orbax wrote was wrong from the start: its files agree with the manifest, they lie."""
    save_steps(tmp_path, 1)

    def lying_save(self: Any, path: Any, host: dict[str, np.ndarray]) -> None:
        noise = host["w"].copy()
        noise.view(np.uint32)[34] ^= 1
        orbax_save(self, path, {**host, "w": noise})

    orbax_save = ocp.StandardCheckpointer.save
    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "save", lying_save)
        save_steps(tmp_path, 2)
    found, told = restore(tmp_path)
    assert found.step == 1
    assert len(told) == 1 and "array w is not what was saved" in told[0]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(step_dir: Path) -> None:
    shutil.rmtree(step_dir)
    step_dir.mkdir()


def flip_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "empty directory": (empty, "manifest.json is missing"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda d: truncate(d / "manifest.json"), "manifest.json"),
    "bit in manifest": (lambda d: flip_middle(d / "manifest.json"), "manifest.json"),
    "half of meta": (lambda d: truncate(d / "meta.json"), "meta.json"),
    "bit in meta": (lambda d: flip_middle(d / "meta.json"), "meta.json"),
    "no meta": (lambda d: (d / "meta.json").unlink(), "meta.json is missing"),
    "no data state": (lambda d: shutil.rmtree(d / "data"), "data/process_0-of-1.json is missing"),
    "no arrays": (lambda d: shutil.rmtree(d / "state"), "is missing"),
    "half an array": (
        lambda d: truncate(max(array_files(d), key=lambda p: p.stat().st_size)),
        "bytes",
    ),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("two")
    save_steps(workdir, 10, 20)
    return workdir


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_step_is_told_skipped_and_replaced(
    damage: str, two_steps: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(two_steps, workdir)
    inflict, reason = DAMAGE[damage]
    inflict(workdir / "checkpoints/20")
    with Checkpoints(workdir, keep=9) as checkpoints:
        assert checkpoints.steps() == [10] and checkpoints.latest_meta() == META
        with pytest.raises(UserError, match=r"checkpoint 20 .*Other complete steps: 10$"):
            checkpoints.restore(make_state(0), step=20)
    found, told = restore(workdir)
    assert found.step == 10
    assert len(told) == 1 and "checkpoint 20" in told[0] and reason in told[0]
    save_steps(workdir, 20)
    found, told = restore(workdir)
    assert found.step == 20 and not told


def test_stale_temporaries_go_with_the_next_save_only(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    stale = ["2.tmp", "1.old", "2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-17"]
    for name in stale:
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    found, told = restore(tmp_path)  # a reader must leave a running writer's files alone
    assert found.step == 1 and not told
    assert set(stale) < set(os.listdir(tmp_path / "checkpoints"))
    save_steps(tmp_path, 2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_error_in_the_run_is_not_hidden_by_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr("mlmoe.manifest.write", broken)
    with pytest.raises(KeyError) as caught, Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(2)}, data_state={}, meta={})
        raise KeyError("the bug")
    assert "disk on fire" in caught.value.__notes__[0]
    assert os.listdir(tmp_path / "checkpoints") == []


PRELUDE = """
import sys, os, resource, jax, jax.numpy as jnp
from mlmoe.checkpoint import Checkpoints
from mlmoe.errors import UserError
def state(step):
    return {"w": jax.random.normal(jax.random.key(step), (1 << 20,)), "n": jnp.int32(step)}
def save(c, step): c.save(step, state(step), data_state={"row": step}, meta={"m": step})
workdir = sys.argv[1]
"""


def start(body: str, workdir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body, str(workdir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_full_disk_is_reported_and_survived(tmp_path: Path) -> None:
    """A limit on the file size makes the write of the arrays fail in the operating system."""
    out, _ = start(
        """
c = Checkpoints(workdir, keep=3)
save(c, 1); c.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
save(c, 2)
try: save(c, 3)
except UserError as error: print("TOLD", error)
print(c.steps())
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
save(c, 3); c.wait()
print(c.steps(), sorted(os.listdir(c.root)))
resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
try: save(c, 4); c.wait()
except UserError as error: print("TOLD", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
c.close(); c.close()
print(c.restore(jax.eval_shape(state, 0)).step)
""",
        tmp_path,
    ).communicate(timeout=60)
    told = [line for line in out.splitlines() if line.startswith("TOLD")]
    assert len(told) == 2, out
    for line, step, older in zip(told, (2, 4), ("1", "1, 3"), strict=True):
        assert f"checkpoint {step} was not saved" in line and "File too large" in line
        assert "needs up to 4.2 MB" in line and f"are intact: {older}" in line
    rest = [line for line in out.splitlines() if not line.startswith("TOLD")]
    assert rest == ["[1]", "[1, 3] ['1', '3']", "3"]  # and no traceback among them


def test_write_that_outlives_its_failed_save_says_nothing(tmp_path: Path) -> None:
    """Orbax closes its event loop under the arrays still being written; their ends find it gone."""
    out, _ = start(
        """
import asyncio, tensorstore, threading
Checkpoints(workdir, keep=1).close(); Checkpoints(workdir, keep=1).close()
def late():
    promise, future = tensorstore.Promise.new()
    async def wait(): await future
    async def fail(): raise OSError
    async def both(): await asyncio.gather(wait(), fail())
    loop = asyncio.new_event_loop()
    try: loop.run_until_complete(both())
    except OSError: print("failed")
    loop.close()
    thread = threading.Thread(target=promise.set_result, args=(1,)); thread.start(); thread.join()
late()
class Loud:
    def __del__(self): raise RuntimeError("heard")
del [Loud()][0]
""",
        tmp_path,
    ).communicate(timeout=60)
    assert out.startswith("failed\n") and "closed" not in out and "heard" in out


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """Saves in a loop, killed after a random while: what is left restores, and saving goes on."""
    rng = random.Random(time.time_ns())
    like = jax.eval_shape(
        lambda s: {"w": jax.random.normal(jax.random.key(s), (1 << 20,)), "n": jnp.int32(s)}, 0
    )
    last = 0
    for _ in range(4):
        child = start(
            f"""
c = Checkpoints(workdir, keep=2)
save(c, {last + 1}); c.wait(); print("ready", flush=True)
for step in range({last + 2}, 10**6): save(c, step); print(step, flush=True)
""",
            tmp_path,
        )
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        delay = rng.uniform(0, 0.6)
        time.sleep(delay)
        child.kill()
        printed = child.communicate()[0].split()
        told: list[str] = []
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            found = checkpoints.restore(like, report=told.append)
            # A save returns once the one before is complete: that one must be found.
            sure = int(printed[-1]) - 1 if printed else last + 1
            assert found is not None and told == []
            step = found.step
            assert step >= sure, (delay, sorted(os.listdir(checkpoints.root)))
            want = jax.random.normal(jax.random.key(step), (1 << 20,))
            np.testing.assert_array_equal(found.state["w"], want)
            assert (found.data_state, found.meta) == ({"row": step}, {"m": step})
            state = {"w": jnp.zeros(1 << 20), "n": jnp.int32(0)}
            checkpoints.save(step + 1, state, data_state={"row": 0}, meta={})
            checkpoints.wait()
            assert checkpoints.steps()[-1] == step + 1
            shutil.rmtree(checkpoints.root / str(step + 1))
            last = step


def test_hard_exit_after_wait_and_plain_exit_after_close(tmp_path: Path) -> None:
    bodies = {
        1: "c = Checkpoints(workdir, keep=9); save(c, 1); c.wait(); os._exit(0)",
        2: "c = Checkpoints(workdir, keep=9); save(c, 2); c.close()",
        3: "with Checkpoints(workdir, keep=9) as c: save(c, 3); raise SystemExit(0)",
    }
    for step, body in bodies.items():
        child = start(body, tmp_path)
        assert (child.communicate(timeout=60)[0], child.returncode) == ("", 0)
        assert Checkpoints(tmp_path, keep=1).steps()[-1] == step
