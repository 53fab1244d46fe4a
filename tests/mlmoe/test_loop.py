"""Whole runs in processes of their own: resume after a kill, signals, refusals, divergence."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import quick_compiles

CONFIG = """
import configs

def get_config():
    c = configs.load("8k:tiny")
    c.update(context=32, batch=8, steps=14, log_every=1, eval_every=7, save_every=5, keep=2)
    c.update(sample_tokens=4, state_check_every=7, state_error_max=1e-12)
    c.model.update(d_model=16)
    c.model.attention.update(heads=2, head_dim=8, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=2)
    c.model.attention.update(v_dim=8)
    c.model.incremental.update(heads=1, key_dim=8, value_dim=8, gate_rank=4)
    c.model.moe.update(dense_hidden=16, experts=4, active=2, latent=8, hidden=8, shared_hidden=8)
    c.model.moe.update(temperature_final=0.5)  # a schedule that goes on where it was
    c.data.update(source="files", path=@PATH@, heldout=0.2, pack_bins=8)
    c.optim.update(warmup=2)
    return c
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run over 20 texts: 14 steps of 256 tokens go through the corpus more than once."""
    root = tmp_path_factory.mktemp("loop")
    texts = root / "texts"
    texts.mkdir()
    rng = random.Random(0)
    for i in range(20):
        words = [rng.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(20)]
        (texts / f"{i}.txt").write_text(f"text {i}: " + " ".join(words))
    path = root / "config.py"
    path.write_text(CONFIG.replace("@PATH@", repr(str(texts))))
    return path


def start(
    config: Path, workdir: Path, *more: str, cache: Path | None = None
) -> "subprocess.Popen[str]":
    """A run on one device; runs share what they compiled, beside the config, or use `cache`."""
    args = [f"--config={config}", f"--config.workdir={workdir}", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.launch", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(config, cache),
    )


def environment(config: Path, cache: Path | None = None) -> dict[str, str]:
    return {
        **os.environ,
        "XLA_FLAGS": " ".join(quick_compiles.FLAGS),
        "JAX_COMPILATION_CACHE_DIR": str(cache or config.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code, out
    return out


def kill_after(line: str, process: "subprocess.Popen[str]") -> None:
    """Kills the run when it prints a line that begins so."""
    assert process.stdout is not None
    for said in process.stdout:
        if said.startswith(line):
            break
    process.kill()
    process.communicate()


def losses(workdir: Path) -> dict[int, float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


@pytest.fixture(scope="module")
def whole_run(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, finish(start(config_file, workdir))


def test_a_run_reports_and_leaves_its_files(whole_run: tuple[Path, str]) -> None:
    workdir, out = whole_run
    for word in ("compiling", "step      1/14", "this model", "trigram", "zlib", "xz", "sample:"):
        assert word in out, out
    for name in ("metrics.jsonl", "loss.png", "summary.json", "checkpoints/14/manifest.json"):
        assert (workdir / name).stat().st_size > 0
    assert list((workdir / "tensorboard").iterdir())
    assert sorted(losses(workdir)) == list(range(1, 15))
    assert sorted(int(p.name) for p in (workdir / "checkpoints").iterdir()) == [10, 14]


def test_states_are_checked_logged_and_warned_about(whole_run: tuple[Path, str]) -> None:
    workdir, out = whole_run
    assert out.count("compiling the check of the states ...") == 1
    assert (
        "step 7: warning: the state is off from float64 by more than state_error_max=1e-12" in out
    )
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    checks = [r for r in records if r["kind"] == "state"]
    assert [(r["step"], r["layer"]) for r in checks] == [(7, [0]), (14, [0])]
    for r in checks:
        assert 0 < r["state_error"][0] < 1e-5 and 0 <= r["at_floor"][0] < 1
        assert 0 < r["memory_q10"][0] < r["memory_q50"][0] < r["memory_q90"][0]


def test_a_finished_run_says_so_and_how_to_go_on(
    config_file: Path, whole_run: tuple[Path, str]
) -> None:
    out = finish(start(config_file, whole_run[0]))
    assert "finished" in out and "--config.steps=28" in out and "this model" in out


def test_an_interrupted_report_is_made_by_the_next_run(
    config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    workdir = shutil.copytree(whole_run[0], tmp_path / "copy")
    (workdir / "summary.json").write_text('{"step": 1')  # cut short, as by a kill
    out = finish(start(config_file, workdir))
    assert "at step 14 of 14" in out and "this model" in out
    assert (workdir / "summary.json").read_text() == (whole_run[0] / "summary.json").read_text()
    assert losses(workdir) == losses(whole_run[0])


def test_one_document_trains_without_held_out_text(config_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("alpha beta gamma " * 50)
    more = (f"--config.data.path={text}", "--config.data.heldout=0")
    assert "no held-out documents" in finish(start(config_file, tmp_path / "w", *more))
    assert "data.heldout=0" in finish(start(config_file, tmp_path / "w", *more[:1]), 2)


def test_another_config_is_refused_with_what_differs(
    config_file: Path, whole_run: tuple[Path, str]
) -> None:
    out = finish(start(config_file, whole_run[0], "--config.optim.lr=0.5", "--config.seed=3"), 2)
    assert "optim.lr: 0.01 -> 0.5" in out and "seed: 0 -> 3" in out and "Traceback" not in out


@pytest.mark.parametrize(
    "after", [pytest.param("step      3/", marks=pytest.mark.slow), "step     12/"]
)
def test_killed_and_resumed_equals_never_stopped(
    after: str, config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    kill_after(after, start(config_file, tmp_path))
    # One of the two compiles all again: a resumed run may not owe its bits to a shared cache.
    cache = tmp_path / "empty" if "12" in after else None
    finish(start(config_file, tmp_path, cache=cache))
    assert losses(tmp_path) == losses(whole_run[0])


def test_sigterm_saves_and_the_same_command_goes_on(
    config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    process = start(config_file, tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step      2/"):
            break
    process.send_signal(signal.SIGTERM)
    out = finish(process, 143)
    assert "is saved" in out and "Traceback" not in out
    finish(start(config_file, tmp_path))
    assert losses(tmp_path) == losses(whole_run[0])


def test_a_reader_that_leaves_costs_no_step(config_file: Path, tmp_path: Path) -> None:
    process = start(config_file, tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step      2/"):
            break
    process.stdout.close()  # as `| head` does, or `| tee` when Ctrl-C ends both
    assert process.wait() == 141
    assert int(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]) >= 2
    assert any(p.name.isdigit() for p in (tmp_path / "checkpoints").iterdir())


def test_ctrl_c_while_compiling_has_nothing_to_save(config_file: Path, tmp_path: Path) -> None:
    process = start(config_file, tmp_path, cache=tmp_path / "empty")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiling"):
            break
    time.sleep(1.0)
    began = time.time()
    process.send_signal(signal.SIGINT)
    assert "nothing to save" in finish(process, 130)
    assert time.time() - began < 10


def test_divergence_stops_names_the_step_and_saves_nothing_bad(
    config_file: Path, tmp_path: Path
) -> None:
    more = (
        "--config.optim.lr=1e30",
        "--config.optim.adam_lr=1e30",
        "--config.optim.max_bad_steps=3",
    )
    out = finish(start(config_file, tmp_path, *more), 2)
    assert "3 steps in a row were not finite" in out and "Traceback" not in out
    assert list(tmp_path.glob("bad_batch_*.npz"))


def test_only_damaged_checkpoints_are_not_overwritten(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "50").mkdir(parents=True)
    out = finish(start(config_file, tmp_path), 2)
    assert "damaged" in out and "[50]" in out and (tmp_path / "checkpoints" / "50").exists()


def test_a_run_starts_from_another_ones_weights(
    config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    """The same model: everything is carried, only the temperature begins anew; run again, it is
    finished and starts nothing over."""
    more = (f"--config.init_from={whole_run[0]}",)
    out = finish(start(config_file, tmp_path / "next", *more))
    assert f"starting from step 14 of {whole_run[0]}" in out and "converted" not in out
    before, after = re.findall(r"bits/byte: (\S+) before the hand-over, (\S+) after", out)[0]
    assert abs(float(before) - float(after)) < 0.05
    assert before != after  # the temperature was 0.5 in the end and is 1 again
    other_spelling = f"{more[0]}/../{whole_run[0].name}/"
    assert "finished" in finish(start(config_file, tmp_path / "next", other_spelling))
    lines = (tmp_path / "next" / "metrics.jsonl").read_text().splitlines()
    kinds = [r["kind"] for r in map(json.loads, lines)]
    assert json.loads(lines[0])["from_step"] == 14
    assert kinds[0] == "handover" and kinds.count("train") == 14
    # Killed between two checkpoints and started again: the hand-over is not done a second time.
    kill_after("step     12/", start(config_file, tmp_path / "killed", *more))
    assert "starting from" not in finish(start(config_file, tmp_path / "killed", *more))
    assert losses(tmp_path / "killed") == losses(tmp_path / "next")


def test_a_hand_over_that_cannot_be_is_refused_before_compiling(
    config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    origin = f"--config.init_from={whole_run[0]}"
    for change, says in (
        ("--config.model.d_model=24", "embedding: is (264, 16) in the old model, (264, 24)"),
        ("--config.model.layout=LL", "there is no way from incremental attention, delta"),
        (f"--config.init_from={tmp_path}", "is not the folder of a run"),
    ):
        out = finish(start(config_file, tmp_path / "next", origin, change), 2)
        assert says in out and "Traceback" not in out and "compiling" not in out


LATE = """
from experiments import launch
from mlmoe.data import sources
from mlmoe.stop import run_program
sources.READ_WHOLE_BYTES = -1  # a corpus too large to be read at the start
run_program(launch.main, "")
"""


def test_a_bad_document_found_late_costs_no_step(config_file: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {i} " + "alpha beta " * 10}) for i in range(24)]
    rows[16] = '{"text": null}'  # the last of the first epoch
    (tmp_path / "late.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-c", LATE, f"--config={config_file}"]
    command += [f"--config.workdir={tmp_path / 'w'}", "--config.data.source=jsonl"]
    command += [f"--config.data.path={tmp_path / 'late.jsonl'}"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(config_file))
    assert run.returncode == 2 and "late.jsonl:17" in run.stderr, run.stderr
    saved = re.findall(r"step (\d+) is saved", run.stdout)[0]
    assert max(p.name for p in (tmp_path / "w" / "checkpoints").iterdir()) == saved


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(
    config_file: Path, whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    """Stopped after step 7 is saved and before its evaluation is logged, or just after."""
    process = start(config_file, tmp_path, "--config.save_every=7")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("step 7: held-out", "compiling the evaluation")):
            break
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    finish(start(config_file, tmp_path, "--config.save_every=7"))
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [r["step"] for r in records if r["kind"] == "eval"] == [7, 14]
