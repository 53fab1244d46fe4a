"""What a kind of layer can do at equal state size: associative recall, and parity.

Recall (Zoology's MQAR, arXiv 2312.04927): rows of 128 tokens with 4 to 32 pairs of key and value,
each key asked once, 0 in between (random symbols out of so few would be keys again); two layers of
two heads with 16 x 16 states, and D with a latent layer, which looks back at every token. Parity:
the running sum modulo 2 of random bits, one layer, learnt on 40 tokens and asked on 160; a state
that forgets or stays (beta <= 1) cannot change sign, one that is reflected (beta <= 2) can
(arXiv 2411.12537). A scaled-down form of arXiv 2510.26692, section 5.1.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.ablate.arguments import add_out, add_seeds, at_least
from experiments.ablate.results import Row, plot_curves, table, write_csv
from experiments.ablate.training import Run, fit_to, tiny
from mlmoe.build import compile_eval, put
from mlmoe.config import TrainConfig
from mlmoe.data.batch import Batch
from mlmoe.data.tasks.symbols import mqar
from mlmoe.sharding import make_mesh

VOCAB, LENGTH, PAIRS = 128, 128, (4, 8, 16, 32)
LEARNT, ASKED = 40, 160  # tokens of parity
RECALL = {"AA": "additive", "DD": "delta", "DL": "delta and latent attention"}
TEST_BATCHES = 8
_TEST = 1 << 20  # the seed of the first row that is asked and never trained on


def small(c: ConfigDict, layout: str, context: int, beta_max: float) -> None:
    """Dense layers of width 64 with states of 16 x 16."""
    c.update(context=context, batch=64)
    m = c.model
    m.update(layout=layout, layers=len(layout), vocab=VOCAB, vocab_chunk=VOCAB, d_model=64)
    m.attention.update(heads=2, q_rank=32, kv_rank=32, nope_dim=24, rope_dim=8, v_dim=32)
    m.incremental.update(heads=2, key_dim=16, value_dim=16, gate_rank=16, beta_max=beta_max)
    m.moe.update(dense_layers=len(layout), dense_hidden=128)
    m.residual.kind = "none"
    c.optim.update(lr=5e-3, adam_lr=5e-3)


def rows_of(inputs_BT: np.ndarray, targets_BT: np.ndarray, asked_BT: np.ndarray) -> Batch:
    """A batch of whole rows whose loss is that of the tokens asked for."""
    B, T = inputs_BT.shape
    positions_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    inputs_BT, targets_BT = inputs_BT.astype(np.int32), targets_BT.astype(np.int32)
    ones_BT = np.ones((B, T), np.int32)
    return Batch(inputs_BT, targets_BT, ones_BT, positions_BT, asked_BT.astype(np.float32))


def recall_batch(first: int, rows: int, pairs: tuple[int, ...]) -> Batch:
    """Rows first, first + 1, ..., with each number of pairs in turn."""
    examples = [
        mqar(LENGTH + 1, seed=n, vocab=VOCAB, pairs=pairs[n % len(pairs)])
        for n in range(first, first + rows)
    ]
    tokens, answer = (np.stack(x) for x in zip(*examples, strict=True))
    return rows_of(tokens[:, :-1], tokens[:, 1:], answer[:, 1:])


def parity_batch(first: int, rows: int, length: int) -> Batch:
    """Bits, and after each the parity of all until there."""
    bits_BT = np.random.default_rng(first).integers(0, 2, size=(rows, length))
    return rows_of(bits_BT, np.cumsum(bits_BT, axis=1) % 2, np.ones_like(bits_BT))


def endless(make: Callable[[int], Batch], rows: int, seed: int) -> Iterator[Batch]:
    """Training batches: rows that no test asks for, others for each seed."""
    first = _TEST + (1 + seed) * 10_000_000
    while True:
        yield make(first)
        first += rows


def accuracy(mesh: jax.sharding.Mesh, run: Run, batches: list[Batch]) -> float:
    """Share of the tokens asked for that the model holds most likely."""
    context = batches[0].tokens_BT.shape[1]
    config = TrainConfig(**{**vars(run.config), "context": context})
    step = compile_eval(config, run.program, mesh)
    state = run.state
    sums = [step(state.params, state.routing, put(b, mesh)) for b in batches]
    return float(sum(s.correct for s in sums) / sum(s.tokens for s in sums))


def recall_arm(mesh: jax.sharding.Mesh, layout: str, seed: int, steps: int) -> list[Row]:
    """A row for each number of pairs, all of one model that saw all numbers."""
    change = functools.partial(small, layout=layout, context=LENGTH, beta_max=1.0)
    config = tiny(change, seed, steps)
    rows = config.batch
    train = endless(functools.partial(recall_batch, rows=rows, pairs=PAIRS), rows, seed)
    run = fit_to(mesh, config, train)
    found: list[Row] = []
    for pairs in PAIRS:
        tests = [recall_batch(_TEST + rows * i, rows, (pairs,)) for i in range(TEST_BATCHES)]
        right = accuracy(mesh, run, tests)
        found.append({"layers": layout, "pairs": pairs, "seed": seed, "accuracy": right})
        print(found[-1], flush=True)
    return found


def parity_arm(mesh: jax.sharding.Mesh, beta_max: float, seed: int, steps: int) -> Row:
    """Accuracy at the learnt length, and on the tokens beyond it."""
    change = functools.partial(small, layout="D", context=LEARNT, beta_max=beta_max)
    config = tiny(change, seed, steps)
    rows = config.batch
    train = endless(functools.partial(parity_batch, rows=rows, length=LEARNT), rows, seed)
    run = fit_to(mesh, config, train)
    tests = [parity_batch(i, rows, ASKED) for i in range(TEST_BATCHES)]
    beyond = [b._replace(weights_BT=b.weights_BT * (np.arange(ASKED) >= LEARNT)) for b in tests]
    row: Row = {
        "beta": f"<= {beta_max:g}",
        "seed": seed,
        f"first {LEARNT}": accuracy(mesh, run, [parity_batch(i, rows, LEARNT) for i in range(8)]),
        f"{LEARNT} to {ASKED}": accuracy(mesh, run, beyond),
    }
    print(row, flush=True)
    return row


def study(seeds: int, steps: int, parity_steps: int, out: Path) -> None:
    """Both studies; prints their tables and writes CSV and PNG."""
    mesh = make_mesh()
    recall: list[Row] = []
    for layout in RECALL:
        for seed in range(seeds):
            recall += recall_arm(mesh, layout, seed, steps)
            write_csv(recall, out / "recall.csv")
    print(table(recall, ("layers", "pairs"), ["accuracy"]))
    plot_curves(_by_pairs(recall), out / "recall.png", {"xlabel": "pairs", "ylabel": "accuracy"})
    parity: list[Row] = []
    for beta in (1.0, 2.0):
        for seed in range(seeds):
            parity.append(parity_arm(mesh, beta, seed, parity_steps))
            write_csv(parity, out / "parity.csv")
    print(table(parity, ("beta",), list(parity[0])[2:]))


def _by_pairs(rows: list[Row]) -> dict[str, tuple[Any, Any]]:
    """The mean over seeds, by layout."""
    return {
        f"{layout}: {name}": (
            PAIRS,
            [
                np.mean([r["accuracy"] for r in rows if (r["layers"], r["pairs"]) == (layout, n)])
                for n in PAIRS
            ],
        )
        for layout, name in RECALL.items()
    }


def arguments(parser: Any) -> None:
    add_seeds(parser)
    number = at_least(1)
    parser.add_argument("--steps", type=number, default=2000, help="of recall (%(default)s)")
    parser.add_argument("--parity_steps", type=number, default=1000, help="(%(default)s)")
    add_out(parser)
