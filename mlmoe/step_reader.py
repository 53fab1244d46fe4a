"""The metrics of a step, read while the next one runs, logged, and watched for bad steps."""

import time
from typing import TYPE_CHECKING

import numpy as np

from mlmoe.data.batch import Batch, split_targets
from mlmoe.errors import UserError
from mlmoe.layers.balance import Starvation
from mlmoe.metrics import MetricsLog, Progress, Values, to_host, writing
from mlmoe.step import Metrics

if TYPE_CHECKING:
    from mlmoe.loop import Run


class StepReader:
    """Queue a step, and the one before is read: the device never waits for the host."""

    def __init__(self, run: "Run", log: MetricsLog, progress: Progress, bytes_per_token: float):
        self.config, self.workdir = run.config, run.workdir
        self.bos_id, self.eos_id = run.tokenizer.bos_id, run.tokenizer.eos_id
        self.split, self.targets = 0, 0  # since the last record
        self.log, self.progress, self.bytes_per_token = log, progress, bytes_per_token
        self.pending: tuple[int, Metrics, Batch] | None = None
        self.starvation = Starvation(run.config.model.moe.experts)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last step (an evaluation, a save) out of tokens_per_s."""
        self.began, self.tokens = time.perf_counter(), 0.0

    def queue(self, step: int, metrics: Metrics, batch: Batch) -> None:
        """Takes the metrics of a step just queued and reads those of the step before."""
        self.flush()
        self.pending = (step, metrics, batch)

    def flush(self) -> None:
        if self.pending is None:
            return
        (step, metrics, batch), self.pending = self.pending, None
        values = to_host(metrics)
        self.tokens += values["tokens"]
        self.targets += int(values["tokens"])
        self.split += split_targets(batch, self.bos_id, self.eos_id)
        values["bits_per_byte"] = values["loss"] / np.log(2) / self.bytes_per_token
        values["tokens_per_s"] = self.tokens / max(1e-9, time.perf_counter() - self.began)
        due = step % self.config.log_every == 0 or step in (1, self.config.steps)
        if due:
            values |= {"split_targets": self.split, "read_targets": self.targets}
            self.split = self.targets = 0
            self.log.write("train", step, values)
            self.restart_clock()
        self.progress.step(step, values, due)
        if due and (text := self.starvation.look(values)):
            self.progress.say(f"step {step}: {text}")
        if values["bad_in_a_row"]:
            self.bad_step(step, values, batch)

    def bad_step(self, step: int, values: Values, batch: Batch) -> None:
        bad, limit = int(values["bad_in_a_row"]), self.config.optim.max_bad_steps
        names = {"loss": "loss", "grad_norm": "gradient norm", "update_norm": "update norm"}
        what = ", ".join(f"{said} {values[name]:.4g}" for name, said in names.items())
        self.progress.say(f"step {step}: {what}: not applied ({bad} in a row)")
        if bad >= limit:
            path = self.workdir / f"bad_batch_{step}.npz"
            with writing(path):
                np.savez_compressed(path, **batch._asdict())
            raise UserError(
                f"step {step}: {what}; {bad} steps in a row were not finite "
                f"(optim.max_bad_steps={limit}). Nothing of them was applied or saved. The batch "
                f"of step {step} is in {path}. Try a lower --config.optim.lr, in a new workdir"
            )
