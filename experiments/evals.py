"""Long-context evaluation of a trained run: synthetic tasks, and held-out loss by position.

    python -m experiments.evals runs/8k-tiny
    python -m experiments.evals runs/8k-tiny --tasks passkey mqar --lengths 256 1024 --examples 100
    python -m experiments.evals runs/8k-tiny --tasks --positions 4096        the loss alone

Reads the newest checkpoint and changes nothing in it. Prints a Markdown table: the share of
examples whose whole answer greedy decoding writes, with its standard error, by task, length (in
tokens, prompt and answer) and depth of what is asked for; and the held-out nats a token by
position. Writes tasks.csv, tasks.png, positions.csv and positions.png to --out.

With --tokens N, the examples of a task and length have about N tokens: there are fewer where they
are long, and one at every other depth where there is no room for one at each.

Tasks: {tasks}.
Examples are never among those that the source 'tasks' trains on. Exit codes: 0 done, 2 bad input,
130 and 143 stopped by a signal (what was measured until then is written).
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments.ablate.arguments import at_least, folder
from experiments.ablate.results import Row, plot_curves, table, write_csv
from experiments.eval_plots import plot_scores
from mlmoe.data.sources import open_corpus
from mlmoe.data.tasks import DEPTH_TASKS, SHORTEST, TASKS, check_task, evaluation_example
from mlmoe.data.tasks.example import Example, check_depth
from mlmoe.data.tokenizers import ByteTokenizer, make_tokenizer
from mlmoe.errors import UserError, one_of, require
from mlmoe.sharding import make_mesh
from mlmoe.stop import Stopped, StopSignal, leave, run_program
from mlmoe.task_eval import Evaluator, PositionLoss, long_pieces, rows_at
from mlmoe.trained import Trained, load_trained
from pallas_kernels.libtpu import describe_no_tpu

BYTES = ByteTokenizer()
POSITION_ROWS = 32
TICK_SECONDS = 15.0
ACCURACY = "accuracy ± s.e."


class Texts(NamedTuple):
    """What the loss by position is measured on; no pieces: it is left out."""

    pieces: list[np.ndarray]
    length: int


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; workdir and names are checked later, with messages of their own."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evals",
        description=(__doc__ or "").format(tasks=", ".join(TASKS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdir", help="folder of a run: the one with checkpoints/ in it")
    add = parser.add_argument
    add("--tasks", nargs="*", default=["passkey", "needle_multi"], metavar="NAME")
    add("--lengths", nargs="+", type=at_least(1), metavar="N", help="default: 1, 2, 4 x context")
    add("--depths", nargs="+", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="X")
    add("--examples", type=at_least(1), default=32, help="for each task, length and depth")
    add("--tokens", type=at_least(1), help="most of a task's examples of a length, see below")
    add("--positions", type=at_least(0), help="tokens; default: 4 x context, as texts allow; 0: no")
    add("--seed", type=at_least(0), default=0, help="of the examples")
    add("--expert", type=at_least(1), default=1, help="devices that share a copy of the experts")
    add("--out", type=folder, help="default: WORKDIR/evals")
    return parser.parse_args(argv)


def lengths_of(args: argparse.Namespace, context: int) -> list[int]:
    """The lengths asked for, or 1, 2 and 4 times the trained one where they hold an example."""
    if args.lengths:
        return sorted(set(args.lengths))
    least = max((SHORTEST[name] for name in args.tasks), default=0)
    return [n * context for n in (1, 2, 4) if n * context >= least] or [least]


def check(args: argparse.Namespace) -> None:
    """Everything that needs no checkpoint. Raises UserError."""
    for name in args.tasks:
        one_of("--tasks", name, tuple(TASKS))
        for length in args.lengths or ():
            check_task(name, length)
    for depth in args.depths:
        check_depth("--depths", depth)
    devices = jax.device_count()
    near = max(d for d in range(1, devices + 1) if devices % d == 0 and d <= args.expert)
    require(
        devices % args.expert == 0,
        f"--expert {args.expert} does not divide the {devices} devices; nearest valid: {near}",
    )


def default_out(workdir: str) -> Path:
    """WORKDIR/evals. Raises UserError where it cannot be written to."""
    try:
        return folder(f"{workdir}/evals")
    except argparse.ArgumentTypeError as e:
        raise UserError(f"{e}; give --out=<another folder>") from e


def find_texts(args: argparse.Namespace, trained: Trained, say: Callable[[str], None]) -> Texts:
    """Held-out pieces for the loss by position, at 4 times the context or as long as there are."""
    config = trained.config
    if args.positions == 0:
        return Texts([], 0)
    try:
        tokenizer = make_tokenizer(config.data.tokenizer)
        corpus = open_corpus(config.data, tokenizer, context=config.context)
    except UserError as e:
        raise UserError(f"{e}; --positions 0 leaves the loss by position out") from e
    length = args.positions or 4 * config.context
    pieces, longest = long_pieces(corpus, tokenizer, length, POSITION_ROWS)
    if not pieces and longest > 1 and not args.positions:
        length = longest - 1
        pieces, _ = long_pieces(corpus, tokenizer, length, POSITION_ROWS)
        say(f"no held-out document has {4 * config.context} tokens: loss up to {length}")
    elif not pieces and longest > 1:
        message = f"--positions {length}: the longest held-out document has {longest:,} tokens"
        raise UserError(f"{message}; nearest valid: {longest - 1}")
    elif not pieces:
        require(not args.positions, "--positions: this run has no held-out documents")
        say("no held-out documents: no loss by position")
    return Texts(pieces, length)


def score_tasks(
    args: argparse.Namespace,
    lengths: Sequence[int],
    evaluator: Evaluator,
    stop: StopSignal,
    rows: list[Row],
) -> None:
    """Appends to `rows` as it goes, so that a stop keeps what there is."""
    for length in lengths if args.tasks else ():
        counts = {name: examples_at(args, name, length) for name in args.tasks}
        size = rows_at(length, max(counts.values()), evaluator.mesh)
        print(f"compiling for {length} tokens, {size} rows at a time ...", flush=True)
        began = time.perf_counter()
        step = stop.run(partial(evaluator.compile_answers, size, length, BYTES.vocab_size))
        print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
        for name, count in counts.items():
            for depth in depths_at(args, name, length):
                began = time.perf_counter()
                where = "" if depth is None else f", depth {depth:g}"
                what = f"{name}, {length} tokens{where}"
                examples = examples_of(args.seed, count, name, length, depth)
                tick = Ticker(stop, what, size, count).tick
                score = stop.run(partial(evaluator.score, step, examples, size, length, tick))
                row = {
                    "task": name,
                    "length": length,
                    "depth": "" if depth is None else depth,
                    "accuracy": score.accuracy,
                    "standard_error": score.error,
                    **score._asdict(),
                    "seed": args.seed,
                }
                rows.append(row)
                took = time.perf_counter() - began
                print(f"{what}: {shown(row)} ({took:.1f} s)", flush=True)


class Ticker:
    """Called before each batch: stops where that is asked for, and says how far a long wait is."""

    def __init__(self, stop: StopSignal, what: str, rows: int, total: int):
        self.stop, self.what, self.rows, self.total = stop, what, rows, total
        self.done, self.said = 0, time.perf_counter()

    def tick(self) -> None:
        self.stop.check()
        if time.perf_counter() - self.said > TICK_SECONDS:
            self.said = time.perf_counter()
            print(f"{self.what}: {self.done} of {self.total} done", flush=True)
        self.done += self.rows


def examples_at(args: argparse.Namespace, name: str, length: int) -> int:
    """For each depth: fewer where they are long, if --tokens says so."""
    depths = len(args.depths) if name in DEPTH_TASKS else 1
    room = args.examples if args.tokens is None else args.tokens // (length * depths)
    return max(1, min(args.examples, room))


def depths_at(args: argparse.Namespace, name: str, length: int) -> Sequence[float | None]:
    """Every other one where --tokens has no room for an example of each."""
    if name not in DEPTH_TASKS:
        return [None]
    full = args.tokens is None or args.tokens >= length * len(args.depths)
    return args.depths if full else args.depths[::2]


def examples_of(
    seed: int, count: int, name: str, length: int, depth: float | None
) -> Iterator[Example]:
    """The examples of one row of the table; the same numbers at every depth."""
    for number in range(count):
        at = 0.0 if depth is None else depth
        yield evaluation_example(name, length, seed=seed, number=number, depth=at)


def shown(row: Row) -> str:
    return f"{row['accuracy']:.2f} ± {row['standard_error']:.2f}"


def report_tasks(rows: list[Row], out: Path) -> None:
    """Table, tasks.csv, tasks.png."""
    lines = [
        {**r, "depth": "-" if r["depth"] == "" else f"{r['depth']:g}", ACCURACY: shown(r)}
        | {"answer tokens right": r["answers_right"] / r["answers"]}
        for r in sorted(rows, key=lambda r: list(TASKS).index(r["task"]))
    ]
    keys = ("task", "length", "depth", ACCURACY)
    print("\n" + table(lines, keys, ("answer tokens right", "examples")) + "\n")
    write_csv(rows, out / "tasks.csv")
    print(f"wrote {out / 'tasks.csv'}")
    plot_scores(rows, out / "tasks.png")


def report_positions(loss: PositionLoss, context: int, out: Path) -> None:
    """Table, positions.csv, positions.png with a line where training ended."""
    spans = zip(loss.edges[:-1].tolist(), (loss.edges[1:] - 1).tolist(), strict=True)
    rows = [
        {"first": first, "last": last, "nats": nats, "standard_error": error, "rows": loss.rows}
        for (first, last), nats, error in zip(
            spans, loss.nats.tolist(), loss.error.tolist(), strict=True
        )
    ]
    lines = [
        {
            "positions": f"{r['first']:,} to {r['last']:,}",
            "nats a token ± s.e.": f"{r['nats']:.4f} ± {r['standard_error']:.4f}",
            "rows": loss.rows,
        }
        for r in rows
    ]
    print("\n" + table(lines, ("positions", "nats a token ± s.e."), ("rows",)) + "\n")
    write_csv(rows, out / "positions.csv")
    print(f"wrote {out / 'positions.csv'}")
    middle = np.sqrt((loss.edges[:-1] + 1.0) * loss.edges[1:])
    edge = (np.array([context, context]), np.array([loss.nats.min(), loss.nats.max()]))
    curves = {"held-out loss": (middle, loss.nats), "trained length": edge}
    labels = {"xlabel": "position", "xscale": "log", "ylabel": "nats a token"}
    plot_curves(curves, out / "positions.png", labels)


def run(args: argparse.Namespace, stop: StopSignal) -> None:
    """Loads, checks, measures, reports."""
    check(args)
    mesh = make_mesh(expert=args.expert)
    trained = stop.run(lambda: load_trained(args.workdir, mesh))
    config = trained.config
    out = args.out or default_out(args.workdir)
    print(f"{args.workdir}: step {trained.step}, trained at {config.context} tokens", flush=True)
    lengths = lengths_of(args, config.context)
    if args.tasks and config.data.tokenizer != "bytes":
        message = f"the tasks are written in bytes; this run has {config.data.tokenizer!r}"
        raise UserError(f"{message}. --tasks without a name leaves them out")
    texts = stop.run(lambda: find_texts(args, trained, print))
    state = trained.state
    evaluator = Evaluator(trained.program.model, state.params, state.routing, mesh)
    rows: list[Row] = []
    try:
        score_tasks(args, lengths, evaluator, stop, rows)
    finally:
        if rows and jax.process_index() == 0:
            report_tasks(rows, out)
    if texts.pieces:
        size = rows_at(texts.length, len(texts.pieces), mesh)
        print(
            f"compiling the loss of {texts.length} positions, {size} rows at a time ...", flush=True
        )
        chunk = config.model.vocab_chunk
        step = stop.run(partial(evaluator.compile_positions, size, texts.length, chunk))
        tick = Ticker(stop, "loss by position", size, len(texts.pieces)).tick
        measure = partial(evaluator.loss_by_position, step, texts.pieces, size, tick)
        loss = stop.run(measure)
        if jax.process_index() == 0:
            report_positions(loss, config.context, out)


def main(argv: list[str]) -> int:
    """One command line; returns the exit code."""
    args = parse(argv)
    describe_no_tpu()
    try:
        with StopSignal() as stop:
            run(args, stop)
    except Stopped as e:
        print(f"\nstopped by {e}")
        leave(e.code)  # what still runs in a thread ends with the process
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        message = f"out of memory: {str(e).splitlines()[0]}. Try shorter --lengths"
        raise UserError(message) from e
    return 0


if __name__ == "__main__":
    run_program(main, "before anything was measured")
