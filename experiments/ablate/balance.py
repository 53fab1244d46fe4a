"""Balance strategies side by side, on a router alone and on a tiny model.

The router alone sees fresh normal logits each step, with an offset of standard deviation 1 for
each expert, which is what the strategies have to find. The model is 8k:tiny with more experts.
MaxVio is max load / mean load - 1; jitter the share of the load that changes experts in a step.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.ablate.arguments import add_out, add_seeds, at_least
from experiments.ablate.results import Row, save_figure, table, write_csv
from experiments.ablate.training import Setting, fit, heldout_bits, open_setting, tiny
from mlmoe.config import BALANCE, MoEConfig
from mlmoe.layers import balance
from mlmoe.layers.router import route

ROW = 256  # tokens a row of the router study; the capacity's line runs through all rows
BALANCED = 0.5
ROUTER_STEPS = 12


def router_alone(
    strategies: Sequence[str], experts: int, active: int, tokens: int, steps: int, seed: int
) -> list[Row]:
    """One row a strategy: how its balance goes over `steps` steps of skewed random logits."""
    rng = np.random.default_rng(seed)
    skew_E = rng.normal(size=experts).astype(np.float32)
    key = jax.random.key(seed)
    rows: list[Row] = []
    for name in strategies:
        config = _router_config(name, experts, active)

        @jax.jit
        def step(routing: Any, key: jax.Array, config: MoEConfig = config) -> Any:
            noise_BTE = jax.random.normal(key, (tokens // ROW, ROW, experts))
            live_BT = jnp.ones(noise_BTE.shape[:2], bool)
            one = jax.tree.map(lambda x: x[0], routing)
            _, _, stats = route(config, one, noise_BTE + skew_E[None, None], live_BT)
            stats = jax.tree.map(lambda x: x[None], stats)
            return balance.next_routing(config, routing, stats, jnp.zeros(())), stats

        routing, load_LE, seen = balance.first_routing(config, 1), jnp.zeros((1, experts)), []
        for i in range(steps):
            new, stats = step(routing, jax.random.fold_in(key, i))
            report = balance.report(stats, routing, load_LE)
            seen.append({k: float(v[0]) for k, v in report._asdict().items()})
            routing, load_LE = new, stats.load_E
        vio = [s["max_vio"] for s in seen]
        late = slice(steps // 2, None)
        rows.append(
            {
                "study": "router",
                "experts": experts,
                "strategy": name,
                "seed": seed,
                "steps to 0.5": _steps_until(vio),
                "first MaxVio": vio[0],
                "MaxVio after": float(np.mean(vio[late])),
                "dead": float(np.mean([s["dead"] for s in seen[late]])),
                "jitter": float(np.mean([s["jitter"] for s in seen[late]])),
                "dropped": float(np.mean([s["dropped"] for s in seen[late]])) / (tokens * active),
            }
        )
        print(f"router alone, {experts} experts, seed {seed}: {name}: {_line(vio)}", flush=True)
    return rows


def _steps_until(vio: Sequence[float]) -> float:
    """Steps of balance before MaxVio is below 0.5; inf where it never is."""
    return next((float(i) for i, v in enumerate(vio) if v < BALANCED), float("inf"))


def _line(vio: Sequence[float]) -> str:
    return "MaxVio " + " ".join(f"{v:.2f}" for v in vio[:6]) + f" ... {vio[-1]:.2f}"


def _router_config(name: str, experts: int, active: int) -> MoEConfig:
    change = functools.partial(_experts, name=name, experts=experts, active=active)
    return tiny(change, 0, 1).model.moe


def _experts(c: ConfigDict, name: str, experts: int, active: int) -> None:
    c.model.moe.update(balance=name, experts=experts, active=active)


def in_the_model(
    setting: Setting, name: str, experts: int, active: int, steps: int, seed: int
) -> tuple[Row, np.ndarray]:
    """8k:tiny trained with a strategy: its row, and the load of every step [steps, L, E]."""
    change = functools.partial(_experts, name=name, experts=experts, active=active)
    config = tiny(change, seed, steps)
    loads, reports, losses = [], [], []

    def look(state: Any, metrics: Any) -> None:
        loads.append(np.asarray(state.load_LE))
        reports.append(jax.device_get(metrics.layers.balance))
        losses.append(float(metrics.loss))

    run = fit(setting, config, look)
    last = slice(-min(100, steps // 2), None)
    vio_TL = np.stack([r.max_vio for r in reports])
    row = {
        "study": "model",
        "experts": experts,
        "strategy": name,
        "seed": seed,
        "steps to 0.5": _steps_until(vio_TL.max(1).tolist()),
        "MaxVio after": float(vio_TL[last].mean(0).max()),
        "dead": float(np.sum(np.stack(loads)[last].sum(0) == 0)),
        "starved": float(np.mean([r.starved.sum() for r in reports[last]])),
        "jitter": float(np.mean([r.jitter.mean() for r in reports[last]])),
        "loss": float(np.mean(losses[last])),
        "bits/byte": heldout_bits(setting, run),
    }
    print(f"8k:tiny, {experts} experts, seed {seed}: {name}: {row}", flush=True)
    return row, np.stack(loads)


def plot(loads: dict[str, np.ndarray], path: Path) -> None:
    """MaxVio over the steps of every strategy, and the load of every expert as a heat map."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = next(iter(loads.values())).shape[1]
    figure, axes = plt.subplots(
        1 + len(loads), layers, figsize=(7 * layers, 2.5 * (1 + len(loads))), squeeze=False
    )
    for layer in range(layers):
        curves = axes[0][layer]
        for i, (name, load_TLE) in enumerate(loads.items()):
            share_TE = load_TLE[:, layer] / load_TLE[:, layer].mean(-1, keepdims=True)
            curves.plot(share_TE.max(-1) - 1, label=name, lw=0.8)
            heat = axes[1 + i][layer]
            image = heat.imshow(
                share_TE.T, aspect="auto", vmin=0, vmax=3, cmap="viridis", interpolation="nearest"
            )
            heat.set(title=f"{name}, MoE layer {layer}: load / mean", ylabel="expert")
            figure.colorbar(image, ax=heat)
        curves.set(yscale="log", ylabel="MaxVio", xlabel="step", title=f"MoE layer {layer}")
        curves.axhline(BALANCED, color="grey", ls="--", lw=0.8)
        curves.legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, path)
    plt.close(figure)


def active_for(experts: int) -> int:
    """As sparse as the full scale: 16 of 896, and at least 2."""
    return max(2, experts // 56)


def tokens_for(experts: int) -> int:
    """65,536 for 896 experts and 4,096 for 64: an expert's mean load is about a thousand."""
    return 1 << round(math.log2(73 * experts))


def study(args: Any) -> None:
    """The parts that were asked for; prints their tables, writes CSV and figures to `args.out`."""
    if "router" in args.parts:
        routers(args.seeds, args.experts, args.strategies, args.out)
    if "model" in args.parts:
        models(args.seeds, args.steps, args.experts, args.strategies, args.out)


def routers(seeds: int, experts: Sequence[int], strategies: Sequence[str], out: Path) -> None:
    """Routers alone."""
    rows: list[Row] = []
    for E in experts:
        A = active_for(E)
        for seed in range(seeds):
            rows += router_alone(strategies, E, A, tokens_for(E), ROUTER_STEPS, seed)
            write_csv(rows, out / "balance_router.csv")
    columns = ["steps to 0.5", "first MaxVio", "MaxVio after", "dead", "jitter", "dropped"]
    print(table(rows, ("experts", "strategy"), columns))


def models(
    seeds: int, steps: int, experts: Sequence[int], strategies: Sequence[str], out: Path
) -> None:
    """The tiny model under each strategy."""
    setting = open_setting()
    rows: list[Row] = []
    for E in experts:
        loads: dict[str, np.ndarray] = {}
        for seed in range(seeds):
            for name in strategies:
                row, load = in_the_model(setting, name, E, active_for(E), steps, seed)
                rows.append(row)
                write_csv(rows, out / "balance_model.csv")
                loads.setdefault(name, load)
        plot(loads, out / f"balance_{E}.png")
    columns = ["steps to 0.5", "MaxVio after", "dead", "starved", "jitter", "loss", "bits/byte"]
    print(table(rows, ("experts", "strategy"), columns))


def arguments(parser: Any) -> None:
    add_seeds(parser)
    parser.add_argument("--steps", type=at_least(10), default=1000, help="of the model (1000)")
    parts = ["router", "model"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts, help="(both)")
    numbers = {"type": at_least(3), "nargs": "+", "default": [64, 896]}
    parser.add_argument("--experts", help="numbers of experts (64 896)", **numbers)
    names = {"nargs": "+", "default": list(BALANCE), "choices": BALANCE}
    parser.add_argument("--strategies", help="(all)", **names)
    add_out(parser)
