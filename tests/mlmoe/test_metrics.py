"""The metrics files: what they hold after a resume, and what a full disk says."""

from pathlib import Path

import pytest

from mlmoe.errors import UserError
from mlmoe.metrics import MetricsLog, read_metrics


def test_a_resumed_log_reads_as_if_never_stopped(tmp_path: Path) -> None:
    for start in (0, 2):
        log = MetricsLog(tmp_path, start)
        for step in range(start + 1, start + 4):
            log.write("train", step, {"loss": float(step)})
        log.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


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
