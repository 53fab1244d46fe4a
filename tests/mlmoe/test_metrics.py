"""The metrics files: what they hold after a resume, and what a full disk says."""

import math
from pathlib import Path

import pytest

from mlmoe.errors import UserError
from mlmoe.metrics import MetricsLog, read_metrics
from mlmoe.report import read_summary


def test_a_resumed_log_reads_as_if_never_stopped(tmp_path: Path) -> None:
    for start in (0, 2):
        log = MetricsLog(tmp_path, start)
        for step in range(start + 1, start + 4):
            log.write("train", step, {"loss": float(step)})
        log.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_run_that_begins_anew_keeps_no_record(tmp_path: Path) -> None:
    """A hand-over of a run that was killed before its first checkpoint is not this one's."""
    log = MetricsLog(tmp_path, 0)
    log.write("handover", 0, {"bits_per_byte": 1.0})
    log.close()
    MetricsLog(tmp_path, 0).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_log_is_json_whatever_the_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write("train", 1, {"loss": float("nan"), "layer_load": [1.0, float("inf")]})
    log.close()
    text = log.path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    (record,) = read_metrics(log.path)
    assert math.isnan(record["loss"]) and math.isnan(record["layer_load"][1])


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = b'\xff\xfe\n12\n[]\n{"kind": "train", "step": "x"}\n'
    path.write_bytes(odd + b'{"kind": "train", "step": 1}\n{"kind": "tr')
    assert read_metrics(path) == [{"kind": "train", "step": 1}]


@pytest.mark.parametrize(
    "found", ["[]", '{"step": 3}', "null", '{"step": 3, "sample": ""}', "\xff"]
)
def test_an_odd_summary_is_none(tmp_path: Path, found: str) -> None:
    (tmp_path / "summary.json").write_text(found, encoding="latin-1")
    assert read_summary(tmp_path, 3) == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize("full", ["metrics.jsonl", "TensorBoard"])
def test_a_full_disk_is_said_plainly(tmp_path: Path, full: str) -> None:
    log = MetricsLog(tmp_path, 0)
    if full == "metrics.jsonl":
        log._file.close()
        log._file = Path("/dev/full").open("w")  # noqa: SIM115
    else:
        log._board._writer._py_recordio_writer._writer = Path("/dev/full").open("wb")  # noqa: SIM115
    with pytest.raises(UserError, match=r"No space left on device .* checkpoints are intact"):
        log.write("train", 1, {"loss": 1.0})
    log.close()
