"""Training, from a config to a trained checkpoint: the page to read first.

    open data -> compile -> restore or init -> for each step: batch, step, read the step before,
    evaluate, check the states, save -> report

Stopping anywhere leaves a complete checkpoint or nothing.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from mlmoe.build import (
    Program,
    abstract_state,
    compile_eval,
    compile_probe,
    compile_train,
    first_state,
    make_program,
    put,
)
from mlmoe.checkpoint import Checkpoints
from mlmoe.config import TrainConfig, check_devices, to_dict
from mlmoe.data.batch import Batch
from mlmoe.data.heldout import heldout_batches, lossy, sampled_bytes_per_token
from mlmoe.data.pipeline import train_batches
from mlmoe.data.resume_check import describe_difference, fingerprint
from mlmoe.data.sources import open_corpus
from mlmoe.data.tokenizers import check_vocab, make_tokenizer
from mlmoe.errors import UserError
from mlmoe.evaluate import evaluate
from mlmoe.handover import HandOver, hand_over, plan_hand_over
from mlmoe.layout import INCREMENTAL
from mlmoe.metrics import MetricsLog, Progress
from mlmoe.precision import alarm, describe, measure
from mlmoe.report import final_report, read_summary
from mlmoe.sharding import make_mesh
from mlmoe.step import TrainState
from mlmoe.step_reader import StepReader
from mlmoe.stop import Stopped, StopSignal, leave
from mlmoe.workdir import Workdir

T = TypeVar("T")
Heldout = tuple[list[Batch], int]  # on the devices, and the bytes in them

# What may change between the runs of one workdir; any other difference makes it another run.
MAY_CHANGE = {
    *("workdir", "steps", "log_every", "eval_every", "eval_bytes", "final_eval_bytes"),
    *("save_every", "keep", "sample_tokens", "data.path", "data.prefetch", "data.on_bad"),
    *("state_check_every", "state_error_max"),
    *("mesh.expert", "model.moe.transport"),
}


class Run:
    """The parts of a run that outlive a step: data, programs, files. Built once by `train`."""

    def __init__(self, config: TrainConfig, checkpoints: Checkpoints, stop: StopSignal):
        self.config, self.checkpoints, self.stop = config, checkpoints, stop
        self.workdir = Path(config.workdir).expanduser()
        self.mesh = make_mesh(expert=config.mesh.expert)
        self.tokenizer = make_tokenizer(config.data.tokenizer)
        check_vocab(self.tokenizer, config.model.vocab)
        self.corpus = open_corpus(config.data, self.tokenizer, context=config.context)
        self.sizes = {"context": config.context, "batch_size": config.batch}
        processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}
        self.heldout_args = {"tokenizer": self.tokenizer, **self.sizes, **processes}
        self.batches = train_batches(self.corpus, seed=config.seed, **self.heldout_args)
        self.meta = {
            "config": to_dict(config),
            "data": fingerprint(
                self.corpus,
                tokenizer=self.tokenizer,
                seed=config.seed,
                process_count=jax.process_count(),
                **self.sizes,
            ),
        }
        self.program: Program = make_program(config)
        self.start_step = 0
        self.saved_step: int | None = None
        self.eval_step: Any = None
        self.hand_over: HandOver | None = None  # what init_from gives, at the start of this run
        self.handed_over: dict[str, float] = {}  # held-out bits/byte around it
        self.probe: Any = None
        has_states = any(letter in INCREMENTAL for letter in config.model.letters)
        self.check_every = config.state_check_every if has_states else 0

    def heldout(self, max_bytes: int) -> tuple[list[Batch], int]:
        """Held-out batches on the devices (none if data.heldout=0), and the bytes in them."""
        if not self.config.data.heldout:
            return [], 0
        batches, n_bytes = heldout_batches(self.corpus, max_bytes=max_bytes, **self.heldout_args)
        return [put(b, self.mesh) for b in batches], n_bytes

    def start(self) -> TrainState:
        """The newest sound checkpoint, or the state before step 0."""
        found = self.checkpoints.restore(abstract_state(self.program, self.mesh))
        if found is None:
            if damaged := self.checkpoints.directories():
                raise UserError(
                    f"none of the checkpoints {damaged} in {self.workdir} is sound. Move them away "
                    "to start at step 0, or give --config.workdir=<another folder>"
                )
            return self.first_state()
        self.batches.set_state(found.data_state)
        self.start_step = self.saved_step = found.step
        return found.state

    def first_state(self) -> TrainState:
        """The state before step 0: fresh, or with the weights that `hand_over` gives."""
        if self.hand_over is None:
            return first_state(self.program, self.mesh)
        heldout = self.heldout(self.config.eval_bytes)
        args = (self.config, self.program, self.mesh, heldout, self.stop.check)
        state, before, from_step = hand_over(self.hand_over, *args)
        if heldout[0]:
            after = self.evaluate(state, *heldout, print)["bits_per_byte"]
            before = after if before is None else before
            print(f"held-out bits/byte: {before:.4f} before the hand-over, {after:.4f} after it")
            self.handed_over = {"bits_per_byte_before": before, "bits_per_byte": after}
            self.handed_over["from_step"] = from_step
        return state

    def evaluate(
        self, state: TrainState, batches: list[Batch], n_bytes: int, say: Callable[[str], None]
    ) -> dict[str, float]:
        """Held-out bits/byte and the like; compiles the eval step the first time."""
        if self.eval_step is None:
            say("compiling the evaluation ...")
            build = lambda: compile_eval(self.config, self.program, self.mesh)  # noqa: E731
            self.eval_step = self.stop.run(build)
        args = (state.params, state.routing, batches, n_bytes, self.stop.check)
        return evaluate(self.eval_step, *args)

    def check_states(
        self,
        step: int,
        state: TrainState,
        batch: Batch,
        log: MetricsLog,
        say: Callable[[str], None],
    ) -> None:
        """Logs the error of the recurrences' states, and warns; compiles the probe first."""
        if self.probe is None:
            say("compiling the check of the states ...")
            build = lambda: compile_probe(self.config, self.program, self.mesh)  # noqa: E731
            self.probe = self.stop.run(build)
        samples = self.probe(state.params, state.routing, put(batch, self.mesh))
        values = measure(self.config.model, samples)
        log.write("state", step, values)
        say(f"step {step}: {alarm(values, self.config.state_error_max) or describe(values)}")

    def save(self, step: int, state: TrainState) -> None:
        """Saves `state` and the position in the data in the background, once a step."""
        if step != self.saved_step:
            data_state = self.batches.get_state()
            self.checkpoints.save(step, state, data_state=data_state, meta=self.meta)
            self.saved_step = step


def train(config: TrainConfig) -> None:
    """Trains to `config.steps`, resuming from the newest sound checkpoint in the workdir.

    Raises:
      UserError: bad input, the workdir of another run, or too many bad steps in a row.
    """
    check_devices(config, jax.device_count(), jax.default_backend())
    owner = Workdir(config.workdir) if jax.process_index() == 0 else contextlib.nullcontext()
    path = Path(config.workdir).expanduser()
    with owner, StopSignal() as stop, Checkpoints(path, keep=config.keep) as checkpoints:
        run = before_the_first_step(lambda: Run(config, checkpoints, stop), checkpoints, stop)
        check_same_run(run.meta, checkpoints.latest_meta(), config.workdir)
        if is_finished(run):
            return
        if config.init_from and not checkpoints.directories():
            run.hand_over = plan_hand_over(config, run.program)  # or refuses, before compiling
        print(run.corpus.describe())
        if lost := lossy(run.corpus, run.tokenizer):
            print(f"warning: {lost}")
        try:
            ready = before_the_first_step(lambda: prepare(run), checkpoints, stop)
            run_steps(run, *ready)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise UserError(
                f"out of memory: {str(e).splitlines()[0]}. Try a smaller --config.batch "
                f"(now {config.batch}) or a larger --config.accumulate (now {config.accumulate})"
            ) from e


def before_the_first_step(work: Callable[[], T], checkpoints: Checkpoints, stop: StopSignal) -> T:
    """Runs `work` in a thread; a stop meanwhile ends the process, and says what is kept."""
    try:
        return stop.run(work)
    except Stopped as e:
        saved = checkpoints.steps()
        kept = f"; step {saved[-1]} is kept" if saved else ""
        with contextlib.suppress(OSError):
            print(f"\nstopped by {e} before the first step: nothing to save{kept}")
        leave(e.code)  # the work goes on in its thread: only _exit ends it


def prepare(run: Run) -> tuple[Any, TrainState, Heldout]:
    """The compiled train step (None if no step is left to do), the state to go on from, and the
    held-out batches."""
    config, began = run.config, time.time()
    where = f"{jax.device_count()} {jax.default_backend()} device(s)"
    print(f"compiling for {where} ...", flush=True)
    state = run.start()
    todo = run.start_step < config.steps
    train_step = compile_train(config, run.program, run.mesh) if todo else None
    heldout = run.heldout(config.eval_bytes)
    took = f"ready after {time.time() - began:.1f} s"
    print(f"{took}; at step {run.start_step} of {config.steps}", flush=True)
    return train_step, state, heldout


def run_steps(run: Run, train_step: Any, state: TrainState, evaluated: Heldout) -> None:
    """The loop. Metrics of a step are read once the next is queued, so the device never waits."""
    config, step = run.config, run.start_step
    log = MetricsLog(run.workdir, step)
    if run.handed_over:
        log.write("handover", step, run.handed_over)
    progress = Progress(config.steps, step)
    heldout, n_bytes = evaluated
    bytes_per_token = (
        n_bytes / count_targets(heldout)
        if heldout
        else sampled_bytes_per_token(run.corpus, run.tokenizer)
    )
    reader = StepReader(run, log, progress, bytes_per_token)

    def evaluate_heldout() -> None:
        """Where one is due and the log has none: a run may be stopped between save and this."""
        due = step % config.eval_every == 0 and 0 < step < config.steps
        if due and heldout and not log.has("eval", step):
            reader.flush()
            values = run.evaluate(state, heldout, n_bytes, progress.say)
            log.write("eval", step, values)
            progress.say(f"step {step}: held-out bits/byte {values['bits_per_byte']:.4f}")
            reader.restart_clock()

    try:
        evaluate_heldout()
        while step < config.steps:
            run.stop.check()
            batch = next_batch(run, step, state, reader)
            state, metrics = train_step(state, put(batch, run.mesh))
            step += 1
            reader.queue(step, metrics, batch)
            last = step == config.steps
            if step % config.save_every == 0 or last:
                reader.flush()
                run.save(step, state)
            evaluate_heldout()
            if run.check_every and step % run.check_every == 0:
                reader.flush()
                run.check_states(step, state, batch, log, progress.say)
                reader.restart_clock()
        progress.close()
        run.checkpoints.wait()
        final_report(run, state, log)
    except Stopped as e:
        with contextlib.suppress(Stopped):  # nobody may be left to read its line
            reader.flush()
        run.save(step, state)
        run.checkpoints.wait()
        progress.close()
        with contextlib.suppress(OSError):
            print(f"\nstopped by {e}: step {step} is saved; the same command goes on from there")
        leave(run.stop.code or e.code)
    finally:
        progress.close()
        log.close()


def next_batch(run: Run, step: int, state: TrainState, reader: StepReader) -> Batch:
    """The next batch; a bad document in a large corpus ends the run, but not without a save."""
    try:
        return next(run.batches)
    except (UserError, OSError):
        if step > run.start_step:
            reader.flush()
            run.save(step, state)
            run.checkpoints.wait()
            print(f"\nstep {step} is saved")
        raise


def count_targets(batches: list[Batch]) -> float:
    return sum(float(b.weights_BT.sum()) for b in batches)


def check_same_run(new: dict[str, Any], old: dict[str, Any] | None, workdir: str) -> None:
    """Refuses to continue a workdir whose checkpoint has another config or other data."""
    if old is None:
        return
    old = json.loads(json.dumps(old))  # both sides with JSON's types: tuples are lists
    new = json.loads(json.dumps(new))
    if _folder(old["config"]["init_from"]) == _folder(new["config"]["init_from"]):
        old["config"]["init_from"] = new["config"]["init_from"]  # the same, spelled otherwise
    lines = describe_difference(_flat(old["config"]), _flat(new["config"]))
    lines = [line for line in lines if line.split(":")[0] not in MAY_CHANGE]
    lines += [d for d in describe_difference(old["data"], new["data"]) if d not in lines]
    if lines:
        raise UserError(
            f"workdir {workdir} holds another run; it differs in\n  "
            + "\n  ".join(lines)
            + "\nGive --config.workdir=<another folder>, or the values of that run"
        )


def _folder(text: str) -> str:
    return str(Path(text).expanduser().resolve()) if text else ""


def is_finished(run: Run) -> bool:
    """Says so when the workdir holds a later step than `config.steps`, or that one and its report.

    Where the report was interrupted, or the checkpoint is damaged since, the run goes on instead:
    `restore` finds what is sound, and the report is made from it.
    """
    done = run.checkpoints.steps()
    if not done or done[-1] < run.config.steps:
        return False
    report = read_summary(run.workdir, done[-1])
    again = done[-1] == run.config.steps and not (report and run.checkpoints.sound(done[-1]))
    if again:
        return False
    print(
        f"finished: {run.workdir} holds step {done[-1]} of {run.config.steps}. "
        f"To go on: --config.steps={2 * done[-1]}. To start afresh: --config.workdir=<new folder>"
    )
    print(report)
    return True


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
