"""The curriculum's plan, and what it makes of the folders its stages leave; nothing is trained."""

import json
import math
from pathlib import Path

import pytest

import configs
from experiments.ablate.curriculum import long_rows_alone, seconds_of
from experiments.ablate.recall import parity_batch, recall_batch
from experiments.curriculum import check_order, is_stage, main, parse, plot, recovered, rows, stages
from mlmoe.errors import UserError


@pytest.mark.parametrize("architecture", ["fixed", "staged"])
def test_every_stage_starts_from_the_one_before(architecture: str, tmp_path: Path) -> None:
    argv = ["--scale=tiny", f"--architecture={architecture}", f"--workdir={tmp_path}"]
    found = stages(*parse([*argv, "--config.seed=3"]))
    names = ["copies", "tasks", "8k", "64k-tasks", "64k", "256k", "1m"]
    assert [Path(c.workdir).name for c in found] == names
    assert [c.stage for c in found] == ["8k", "8k", "8k", "64k", "64k", "256k", "1m"]
    assert [c.context for c in found] == [64, 256, 256, 2048, 2048, 8192, 32_768]
    assert [c.init_from for c in found] == ["", *(c.workdir for c in found[:-1])]
    assert {c.seed for c in found} == {3} and len({c.workdir for c in found}) == 7
    assert [is_stage(c) for c in found] == [n in configs.STAGES for n in names]
    longer = stages(*parse([*argv, "--budget=long"]))
    times = [c.steps / s.steps for c, s in zip(longer, found, strict=True)]
    assert times == [1, 1, 1, 1, 1, 4, 5]
    layouts = [c.model.letters for c in found]
    assert layouts == (
        ["DL"] * 7 if architecture == "fixed" else ["RR", "RR", "RR", "DR", "DR", "DR", "DL"]
    )


def test_the_full_scale_goes_the_same_way() -> None:
    """Attention first, then half and all of the hybrid, then sharing and some positions."""
    letters = [configs.load(s, "staged").model.layout for s in configs.STAGES]
    assert letters == [
        "rotary",
        "half_interleaved",
        "interleaved_rotary",
        "interleaved_third_rotary",
    ]
    assert configs.load("1m", "staged").model.attention.kv_share == 3


def test_bad_input_is_one_message() -> None:
    with pytest.raises(UserError, match='Did you mean "steps"'):
        main(["--scale=tiny", "--config.step=3"])
    with pytest.raises(UserError, match="needs at least"):
        main(["--scale=2p8t"])
    for override, says in {
        "context=0": r"config\.context=0: must be greater than 0",
        "context=64": "passkey does not fit in a context of 64 tokens; nearest valid: 183",
        "data.heldout=0": "stages are compared by held-out loss",
        "architecture=staged": "give --architecture",
        "workdir=/tmp/x": "give --workdir",
        "init_from=runs/8k-tiny": "the first part starts fresh",
    }.items():
        with pytest.raises(UserError, match=says):
            stages(*parse(["--scale=tiny", f"--config.{override}"]))
    (first, *_) = stages(*parse(["--scale=tiny", "--workdir=~/runs"]))
    assert first.workdir == str(Path("~/runs/copies").expanduser())


def test_a_part_that_began_from_an_older_step_is_refused(tmp_path: Path) -> None:
    _, part, *_ = stages(*parse(["--scale=tiny", f"--workdir={tmp_path}"]))
    check_order(part)  # has not begun
    Path(part.workdir).mkdir()
    record = {"kind": "handover", "step": 0, "from_step": 0}
    metrics = Path(part.workdir) / "metrics.jsonl"
    metrics.write_text(json.dumps(record))
    check_order(part)
    metrics.write_text(json.dumps(record | {"from_step": 2}))
    with pytest.raises(UserError, match=r"began from step 2 of .*, which now has step 0"):
        check_order(part)


def test_the_report_reads_what_stages_leave(tmp_path: Path) -> None:
    found = stages(*parse(["--scale=tiny", f"--workdir={tmp_path}"]))
    for n, config in enumerate(found):
        records = [{"kind": "train", "step": s, "bits_per_byte": 4.0 - n} for s in range(1, 31)]
        records.append({"kind": "eval", "step": 30, "bits_per_byte": 3.5 - n})
        if n:
            handed = {"bits_per_byte_before": 3.0, "bits_per_byte": 3.1}
            records.insert(0, {"kind": "handover", "step": 0, **handed})
        Path(config.workdir).mkdir()
        text = "\n".join(map(json.dumps, records))
        (Path(config.workdir) / "metrics.jsonl").write_text(text)
        summary = json.dumps({"heldout_bits_per_byte": 3.5 - n})
        (Path(config.workdir) / "summary.json").write_text(summary)
    table = rows(found)
    assert [r["bits/byte"] for r in table] == [3.5, 2.5, 1.5, 0.5, -0.5, -1.5, -2.5]
    assert table[1]["before"] == 3.0 and table[1]["handed over"] == 3.1
    assert table[1]["recovered"] == 30 / found[1].steps
    plot(found, tmp_path / "curriculum.png")
    assert (tmp_path / "curriculum.png").stat().st_size > 1000


def test_a_hand_over_is_made_up_for_where_the_loss_is_as_before() -> None:
    handed = {"kind": "handover", "step": 0, "bits_per_byte_before": 3.0, "bits_per_byte": 3.1}
    tests = [{"kind": "eval", "step": s, "bits_per_byte": 3.2 - s / 100} for s in (10, 20, 30)]
    assert recovered([handed, *tests], 100) == 0.2
    assert recovered([handed, *tests[:1]], 100) == float("inf")
    assert recovered([handed | {"bits_per_byte": 3.0}], 100) == 0
    assert math.isnan(recovered(tests, 100))


def test_long_rows_alone_take_the_time_of_all_stages(tmp_path: Path) -> None:
    found = stages(*parse(["--scale=tiny", f"--workdir={tmp_path}"]))
    for config in found:  # 1,000 tokens a second, whatever the rows
        Path(config.workdir).mkdir()
        size = config.batch * config.context
        records = [
            {"kind": "train", "step": s, "tokens_per_s": 1000.0, "tokens": size}
            for s in (1, 10, config.steps)
        ]
        text = "\n".join(map(json.dumps, records))
        (Path(config.workdir) / "metrics.jsonl").write_text(text)
    tokens = [c.steps * c.batch * c.context for c in found]
    assert [round(1000 * seconds_of(c)) for c in found] == tokens
    alone = long_rows_alone(found, tmp_path / "alone")
    assert abs(alone.steps * alone.batch * alone.context - sum(tokens)) <= alone.context
    assert alone.optim.lr == found[2].optim.lr and not alone.init_from


def test_rows_of_the_recall_study_ask_what_they_say() -> None:
    recall = recall_batch(0, 6, (4, 8))
    assert recall.weights_BT.sum(1).tolist() == [4, 8] * 3
    for tokens, targets, asked in zip(
        recall.tokens_BT, recall.targets_BT, recall.weights_BT, strict=True
    ):
        for t in asked.nonzero()[0]:
            first = list(tokens).index(tokens[t])
            assert first < t and tokens[first + 1] == targets[t]
    parity = parity_batch(0, 3, 9)
    assert (parity.targets_BT[:, -1] == parity.tokens_BT.sum(1) % 2).all()
