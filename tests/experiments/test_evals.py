"""The command line of the long-context evaluation, from a checkpoint to tables and files."""

import csv
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import configs
from experiments.evals import depths_at, examples_at, lengths_of, main, parse
from mlmoe.build import first_state, make_program
from mlmoe.checkpoint import Checkpoints
from mlmoe.config import TrainConfig, from_dict, to_dict
from mlmoe.errors import UserError
from mlmoe.sharding import make_mesh


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a one-layer model before its first step: all its logits are near 0."""
    root = tmp_path_factory.mktemp("evals")
    (root / "texts").mkdir()
    rng = random.Random(0)
    for i in range(20):
        words = [rng.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(40)]
        (root / "texts" / f"{i}.txt").write_text(f"text {i}: " + " ".join(words))
    c = configs.load("8k:tiny")
    c.update(context=32, batch=8)
    c.model.update(d_model=16, layout="L", layers=1)
    c.model.attention.update(heads=1, head_dim=8, q_rank=8, kv_rank=8, nope_dim=6, rope_dim=2)
    c.model.attention.update(v_dim=8)
    c.model.moe.update(dense_layers=1, dense_hidden=16)
    c.data.mixture = (("files", str(root / "texts"), 0.5), ("tasks", "parity,mqar", 0.5))
    c.data.heldout = 0.2
    config = from_dict(TrainConfig, c.to_dict())
    state = first_state(make_program(config), make_mesh())
    with Checkpoints(root / "run", keep=1) as checkpoints:
        checkpoints.save(2, state, data_state={}, meta={"config": to_dict(config)})
    return root / "run"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_files_and_progress(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    argv = [str(workdir), "--tasks", "passkey", "parity", "--lengths", "200", "300"]
    assert main([*argv, "--depths", "0", "1", "--examples", "9", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for text in (
        "step 2, trained at 32 tokens",
        "compiling for 200 tokens, 16 rows at a time",
        "passkey, 300 tokens, depth 1: 0.00 ± 0.07",
        "| task | length | depth | accuracy ± s.e. | answer tokens right | examples |",
        "| passkey | 200 | 0 | 0.00 ± 0.07 |",
        "| parity | 300 | - | ",
        "| 91 to 127 | ",
    ):
        assert text in said, said
    scores = rows_of(out / "tasks.csv")
    assert [(r["task"], r["length"], r["depth"]) for r in scores] == [
        (task, length, depth)
        for length in ("200", "300")
        for task, depth in (("passkey", "0.0"), ("passkey", "1.0"), ("parity", ""))
    ]
    assert [(r["examples"], r["answers"]) for r in scores] == [
        ("9", n) for n in ["45", "45", "9"] * 2
    ]
    losses = rows_of(out / "positions.csv")
    assert (losses[0]["first"], losses[-1]["last"]) == ("0", "127")
    assert all(float(r["nats"]) == pytest.approx(math.log(264), abs=0.1) for r in losses)
    for name in ("tasks.png", "positions.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tasks", "needle"], "--tasks='needle': choose one of 'passkey'"),
        (["--lengths", "200", "100"], "passkey: a length of 100 is too short"),
        (["--depths", "0", "1.5"], "--depths: a depth of 1.5 lies outside"),
        (["--expert", "3"], "--expert 3 does not divide the 8 devices; nearest valid: 2"),
        (["--positions", "5000"], "--positions 5000: the longest held-out document has"),
    ],
)
def test_bad_input_ends_before_any_compilation(
    workdir: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str
) -> None:
    with pytest.raises(UserError) as raised:
        main([str(workdir), *argv])
    assert named in str(raised.value)
    assert "compiling" not in capsys.readouterr().out


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the folder of a run"):
        main([str(tmp_path / "none")])


def test_what_cannot_be_written_or_read_is_found_before_the_work(
    workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main([str(workdir), "--out", str(tmp_path / "file")])
    with Checkpoints(tmp_path / "foreign", keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, data_state={}, meta={"hello": 1})
    with pytest.raises(UserError, match="those of another program"):
        main([str(tmp_path / "foreign")])
    assert "compiling" not in capsys.readouterr().out


def test_long_examples_are_fewer_where_their_tokens_are_limited() -> None:
    limited = parse(["run", "--examples", "16", "--tokens", "20480"])
    many = (64, 256, 1024, 9999)
    assert [examples_at(limited, "passkey", n) for n in many] == [16, 16, 4, 1]
    assert [examples_at(limited, "mqar", n) for n in many] == [16, 16, 16, 2]
    assert depths_at(limited, "passkey", 1024) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert depths_at(limited, "passkey", 9999) == [0.0, 0.5, 1.0]
    assert depths_at(limited, "mqar", 9999) == [None]
    assert examples_at(parse(["run", "--examples", "16"]), "passkey", 10**6) == 16


def test_lengths_are_multiples_of_the_context_that_hold_an_example() -> None:
    assert lengths_of(parse(["run"]), 256) == [256, 512, 1024]
    assert lengths_of(parse(["run"]), 128) == [256, 512]
    assert lengths_of(parse(["run"]), 32) == [232]
    assert lengths_of(parse(["run", "--tasks", "parity"]), 32) == [32, 64, 128]
    assert lengths_of(parse(["run", "--lengths", "900", "300", "900"]), 256) == [300, 900]


def test_ctrl_c_while_compiling_ends_at_once_without_a_traceback(workdir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.evals", str(workdir), "--examples", "5000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("compiling"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=100) == 130, said
    assert "stopped by SIGINT" in said and "Traceback" not in said
