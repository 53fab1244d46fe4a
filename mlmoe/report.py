"""The end of a run: held-out bits/byte beside simple baselines, a sample, a plot, the paths."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mlmoe.data.baselines import baseline_bits
from mlmoe.generate import sample_tokens
from mlmoe.metrics import MetricsLog, plot_losses, read_metrics
from mlmoe.step import TrainState

if TYPE_CHECKING:
    from mlmoe.loop import Run

PROMPT = "def "


def final_report(run: "Run", state: TrainState, log: MetricsLog) -> None:
    """Evaluates on the held-out documents, samples, plots, prints, and writes summary.json."""
    config = run.config
    batches, n_bytes = run.heldout(config.final_eval_bytes)
    values = run.evaluate(state, batches, n_bytes, print)
    log.write("eval", config.steps, values)
    run.stop.check()
    limit = config.final_eval_bytes
    baselines = baseline_bits(run.corpus, tokenizer=run.tokenizer, max_bytes=limit)
    run.stop.check()
    text = sample(run, state) if config.sample_tokens else ""
    if jax.process_index() == 0:
        plot = run.workdir / "loss.png"
        plot_losses(read_metrics(log.path), baselines, plot)
        summary = {
            "step": config.steps,
            "heldout_bits_per_byte": values["bits_per_byte"],
            "heldout_bytes": n_bytes,
            "baselines": baselines,
            "sample": text,
        }
        (run.workdir / "summary.json").write_text(json.dumps(summary, indent=2))
        print(read_summary(run.workdir))


def sample(run: "Run", state: TrainState) -> str:
    """A continuation of `PROMPT` at temperature 0.8."""
    tokenizer = run.tokenizer
    prompt = np.concatenate([[tokenizer.bos_id], tokenizer.encode(PROMPT)])
    ids = sample_tokens(
        run.program.model,
        state.params,
        state.bias_LE,
        prompt,
        context=min(run.config.context, 256),
        count=run.config.sample_tokens,
        vocab=tokenizer.vocab_size,
        stop_id=tokenizer.eos_id,
        temperature=0.8,
        seed=run.config.seed,
    )
    return PROMPT + tokenizer.decode(ids)


def read_summary(workdir: Path) -> str:
    """The report of a finished run as text; '' when it has not been written."""
    path = workdir / "summary.json"
    if not path.exists():
        return ""
    found: dict[str, Any] = json.loads(path.read_text())
    scores = {"this model": found["heldout_bits_per_byte"], **found["baselines"]}
    width = max(map(len, scores))
    rows = [f"  {name:<{width}}  {value:6.3f}" for name, value in scores.items()]
    paths = {
        "checkpoint": workdir / "checkpoints" / str(found["step"]),
        "metrics": workdir / "metrics.jsonl",
        "plot": workdir / "loss.png",
    }
    lines = [
        f"\nheld-out bits/byte after step {found['step']} ({found['heldout_bytes']:,} bytes)",
        *rows,
        *(["\nsample:\n" + found["sample"]] if found["sample"] else []),
        "",
        *(f"{name + ':':<12}{path}" for name, path in paths.items()),
    ]
    return "\n".join(lines)
