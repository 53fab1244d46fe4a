"""The folder of a run: one run at a time, and a clear message where it cannot be used."""

from pathlib import Path

import pytest

from mlmoe.errors import UserError
from mlmoe.workdir import Workdir


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with Workdir(str(tmp_path / "run")):
        with pytest.raises(UserError, match=r"in use by process \d+.*--config\.workdir"):
            Workdir(str(tmp_path / "run")).__enter__()
        with Workdir(str(tmp_path / "other")):
            pass
    with Workdir(str(tmp_path / "run")):
        pass


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="File exists"):
        Workdir(str(tmp_path / "file")).__enter__()
    assert (tmp_path / "file").read_text() == "kept"
