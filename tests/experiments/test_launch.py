"""The command line: what it accepts, what it says, how it exits."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import launch
from mlmoe.errors import UserError


def test_fields_are_overridden() -> None:
    args = ["--config=8k:tiny", "--config.steps=7", "--config.optim.lr=0.5"]
    config = launch.parse(
        [*args, "--config.model.tie_head=true", "--config.data.mixture=(('stdlib','',1.0),)"]
    )
    assert (config.steps, config.optim.lr, config.model.tie_head) == (7, 0.5, True)
    assert config.data.mixture == (("stdlib", "", 1.0),)
    assert config.workdir == "runs/8k-tiny"
    staged = launch.parse(["--config=8k:tiny", "--config.architecture=staged", "--config.workdir="])
    assert staged.workdir == "runs/8k-tiny-staged" and staged.model.letters == "RR"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--config=8k:tiny"),
        (["--config=9k"], "choose one of 8k"),
        (["--config=8k:huge"], "choose one of tiny, small, 2p8t"),
        (["--config=nofile.py"], "no such file"),
        (["--config=8k:tiny", "steps=3"], "did you mean --config.steps=3"),
        (["--config=8k:tiny", "--steps=3"], "did you mean --config.steps=3"),
        (["--config=8k:tiny", "--config.step=3"], 'Did you mean "steps"'),
        (["--config=8k:tiny", "--config.model.moe.expert=3"], 'Did you mean "experts"'),
        (["--config=8k:tiny", "--config.steps=1e3"], "config.steps=1e3"),
        (["--config=8k:tiny", "--config.steps"], "--config.steps=VALUE"),
        (["--config=8k:tiny", "--config.model=3"], "config.model=3"),
        (["--config=8k:tiny", "--config.model.tie_head=maybe"], "expected bool, such as False"),
        (["--config=8k:tiny", "--config.optim.lr=inf"], "optim.lr=inf: must be a finite number"),
        (["--config=8k:tiny", "--config.steps.x=1"], "config.steps is a single value"),
        (["--config=8k:tiny", "--config.data.mixture=(1,2)"], "entry 1 must be (source, path"),
        (["--config=8k:tiny", "--config.model.layout="], "model.layout is empty"),
        (["--config=8k:tiny", "--config=8k:tiny"], "exactly one"),
        (["--config", "8k:tiny"], "with an equals sign"),
        (["--config=8k:tiny", "--config.scale=small"], "chosen by --config=STAGE:SCALE"),
        (["--config=8k:tiny", "--config.architecture=new"], "choose one of 'fixed', 'staged'"),
        (["--config=mine.py:tiny"], "sets its own scale"),
        (["--config=./mine"], "no such file"),
        (["--config=configs"], "is a folder"),
        (["--config=:tiny"], "no such stage"),
        (["--config=tests/a:b.py"], "tests/a:b.py: no such file"),
        (["--config=8k:tiny", "--config.model.moe.experts=1"], "experts=1: at least 2"),
    ],
)
def test_a_bad_command_line_is_one_clear_message(args: list[str], says: str) -> None:
    with pytest.raises(UserError) as e:
        launch.parse(args)
    assert says in str(e.value) and len(str(e.value)) < 400


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return ConfigDict()", "gives no accumulate, architecture"),
        ("raise SystemExit(3)", "Exit: 3"),
    ],
)
def test_a_config_file_that_gives_no_config_is_named(tmp_path: Path, body: str, says: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from ml_collections import ConfigDict\n\ndef get_config():\n    {body}\n")
    with pytest.raises(UserError, match=r"mine\.py: ") as e:
        launch.parse([f"--config={path}"])
    assert says in str(e.value)


def test_what_does_not_fit_names_the_fields_to_blame() -> None:
    config = launch.parse(["--config=8k:tiny", "--config.batch=100000000"])
    with pytest.raises(UserError, match="without these changes to it: batch=100000000"):
        launch.check_fits(config)


def test_a_config_file_works(tmp_path: Path) -> None:
    for path in (tmp_path / "mine", tmp_path / "mine.py"):
        path.write_text(
            "import configs\n\ndef get_config():\n    c = configs.load('8k:tiny')\n"
            "    c.steps = 3\n    return c\n"
        )
        assert launch.parse([f"--config={path}"]).steps == 3
    with pytest.raises(UserError, match="a config file sets its own"):
        launch.parse([f"--config={path}", "--config.architecture=staged"])
    path.write_text("def get_config():\n    return 3\n")
    with pytest.raises(UserError, match="returned int"):
        launch.parse([f"--config={path}"])
    path.write_text("import nothing_of_the_kind\n")
    with pytest.raises(UserError, match="nothing_of_the_kind"):
        launch.parse([f"--config={path}"])


def test_help_explains() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--help"], capture_output=True, text=True
    )
    assert run.returncode == 0
    for word in ("8k", "tiny", "2p8t", "--config.steps"):
        assert word in run.stdout


def test_the_full_scale_is_refused_at_once_with_what_works() -> None:
    began = time.time()
    run = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "--config=8k"], capture_output=True, text=True
    )
    assert run.returncode == 2 and "Traceback" not in run.stderr
    for words in ("2.78 T parameters", "found:", "--config=8k:tiny", "--config=8k:small"):
        assert words in run.stderr
    assert time.time() - began < 60  # 1 s on an idle machine; says that nothing was compiled
