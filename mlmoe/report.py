"""The end of a run: held-out bits/byte beside simple baselines, a sample, a plot, the paths."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mlmoe.data.baselines import baseline_bits
from mlmoe.generate import sample_tokens
from mlmoe.metrics import MetricsLog, plot_losses, read_metrics, writing
from mlmoe.step import TrainState

if TYPE_CHECKING:
    from mlmoe.loop import Run

PROMPT = "def "
SUMMARY = "summary.json"


def final_report(run: "Run", state: TrainState, log: MetricsLog) -> None:
    """Evaluates on the held-out documents, samples, plots, prints, and writes summary.json."""
    config, limit = run.config, run.config.final_eval_bytes
    batches, n_bytes = run.stop.run(lambda: run.heldout(limit))
    bits, baselines = None, {}
    if batches:
        values = run.evaluate(state, batches, n_bytes, print)
        if not log.has("eval", config.steps):  # a report that was interrupted is made again
            log.write("eval", config.steps, values)
        bits = values["bits_per_byte"]
        run.stop.check()
        baselines = baseline_bits(run.corpus, tokenizer=run.tokenizer, max_bytes=limit)
    run.stop.check()
    text = sample(run, state) if config.sample_tokens else ""
    if jax.process_index() == 0:
        plot, records = run.workdir / "loss.png", read_metrics(log.path)
        with writing(plot):
            plot_losses(records, baselines, plot)
        split, read = (
            sum(r.get(name, 0) for r in records) for name in ("split_targets", "read_targets")
        )
        summary = {
            "step": config.steps,
            "heldout_bits_per_byte": bits,
            "heldout_bytes": n_bytes,
            "split_share": split / read if read else None,
            "baselines": baselines,
            "sample": text,
        }
        path = run.workdir / SUMMARY
        with writing(path):
            path.with_suffix(".tmp").write_text(json.dumps(summary, indent=2))
            path.with_suffix(".tmp").replace(path)
        print(read_summary(run.workdir, config.steps))


def sample(run: "Run", state: TrainState) -> str:
    """A continuation of `PROMPT` at temperature 0.8."""
    tokenizer = run.tokenizer
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(PROMPT)])
    ids = sample_tokens(
        run.program.model,
        state.params,
        state.routing.without_capacity(),
        prompt,
        context=min(run.config.context, 256),
        count=run.config.sample_tokens,
        vocab=tokenizer.vocab_size,
        stop_id=tokenizer.eos_id,
        temperature=0.8,
        seed=run.config.seed,
    )
    return PROMPT + tokenizer.decode(ids)


def read_summary(workdir: Path, step: int) -> str:
    """The report of a run that finished at `step` as text; '' when it has not been written."""
    try:
        found: dict[str, Any] = json.loads((workdir / SUMMARY).read_text())
        same = found["step"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    fields = ("heldout_bits_per_byte", "heldout_bytes", "baselines", "sample")
    if not same or any(name not in found for name in fields):
        return ""
    scores = {"this model": found["heldout_bits_per_byte"], **found["baselines"]}
    width = max(map(len, scores))
    rows = [f"  {name:<{width}}  {value:6.3f}" for name, value in scores.items() if value]
    rows = rows or ["  no held-out documents (data.heldout=0)"]
    paths = {
        "checkpoint": workdir / "checkpoints" / str(found["step"]),
        "metrics": workdir / "metrics.jsonl",
        "plot": workdir / "loss.png",
    }
    lines = [
        f"\nheld-out bits/byte after step {found['step']} ({found['heldout_bytes']:,} bytes)",
        *rows,
        *_split_line(found),
        *(["\nsample:\n" + found["sample"]] if found["sample"] else []),
        "",
        *(f"{name + ':':<12}{path}" for name, path in paths.items()),
    ]
    return "\n".join(lines)


def _split_line(found: dict[str, Any]) -> list[str]:
    """What packing cut."""
    if found.get("split_share") is None:
        return []
    share = f"{100 * found['split_share']:.1f} %"
    return [f"\ntokens of training in documents that are split over rows: {share}"]
