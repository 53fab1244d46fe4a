"""The studies' command line; the studies themselves are run by hand (experiments/LOG.md)."""

from pathlib import Path

import pytest

from experiments.ablate.__main__ import parse
from experiments.ablate.results import table, write_csv


@pytest.mark.parametrize("study", ["balance", "activation", "latent", "recall", "curriculum"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        parse([study, f"--out={tmp_path / 'file' / 'x'}"])
    assert "Not a directory" in capsys.readouterr().err
    assert parse([study, f"--out={tmp_path / 'new'}"]).out == tmp_path / "new"


def test_every_study_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["latent", "--help"])
    text = capsys.readouterr().out
    assert "How narrow the experts' space should be" in text and "(500)" in text


def test_rows_are_on_disk_after_each_of_them(tmp_path: Path) -> None:
    rows = [{"arm": "a", "seed": 0, "x": 1.5}]
    write_csv(rows, tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().splitlines() == ["arm,seed,x", "a,0,1.5"]
    rows.append({"arm": "a", "seed": 1, "x": 2.5})
    write_csv(rows, tmp_path / "x.csv")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 3
    assert "| a | 2 (1.5, 2.5) |" in table(rows, ("arm",), ["x"])
