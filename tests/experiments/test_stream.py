"""The table of precision, memory and time by position."""

import pytest

from experiments import stream


def test_it_prints_a_row_a_position_and_the_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    stream.main(["--letter=A", "--tokens=5000", "--piece=2048"])
    told = capsys.readouterr().out
    assert "A: 5,000 tokens in pieces of 2,048; 19,456 bytes are carried" in told
    rows = [line.split("|")[1:-1] for line in told.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == ["4,096", "5,000"]
    assert all(0 < float(error) < 1e-4 for row in rows for error in row[1:3])
    assert "5,000 over 4,096 tokens: peak memory 1." in told and "time per token" in told


def test_a_piece_that_misses_the_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stream.main(["--piece=3000"])
    assert "--piece=3000 does not divide 4096" in capsys.readouterr().err
