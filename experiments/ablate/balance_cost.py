"""What the quantile balance takes of a step: of 8k:tiny by the clock, of the full scale by XLA.

The router of one layer is compiled with the balance (statistics and update) and without; the rest
of a step is the same but for its data, since better balance changes what the experts do. Here both
programs are timed in turn, beside the whole step. For v5p they are compiled ahead of time and XLA's
own cycle estimates, which are too high for elementwise work, are set against the least time that
the layer's matrix products can take (6 FLOPs a parameter and token at the chip's peak). That is an
estimate of a compiler: nothing is run on a TPU.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import configs
from experiments.ablate.step_time import step_milliseconds
from experiments.ablate.training import tiny
from mlmoe.build import compiler_options
from mlmoe.config import MoEConfig, TrainConfig, from_dict
from mlmoe.count import parameters
from mlmoe.layers import balance
from mlmoe.layers.router import route
from pallas_kernels import aot, schedule

RULES = ("none", "quantile")
TOKENS = 8192  # of a v5p chip in one step


def router(config: MoEConfig, name: str) -> Callable[..., Any]:
    """(logits [B, T, E], bias [1, E]) -> experts, weights and the next bias under a rule."""
    c = dataclasses.replace(config, balance=name)

    def step(logits_BTE: jax.Array, bias_LE: jax.Array) -> Any:
        routing = balance.first_routing(c, 1)._replace(bias=bias_LE)
        one, live_BT = jax.tree.map(lambda x: x[0], routing), jnp.ones(logits_BTE.shape[:2], bool)
        experts_NA, p_NA, stats = route(c, one, logits_BTE, live_BT)
        stats = jax.tree.map(lambda x: x[None], stats)
        return experts_NA, p_NA, balance.next_routing(c, routing, stats, jnp.zeros(())).bias

    return step


def on_this_machine(config: TrainConfig, repeats: int = 300) -> dict[str, float]:
    """Median milliseconds of the router of one layer under each rule, in turn."""
    moe = config.model.moe
    logits_BTE = jax.random.normal(jax.random.key(0), (config.batch, config.context, moe.experts))
    args, run = (logits_BTE, jnp.zeros((1, moe.experts))), {}
    times: dict[str, list[float]] = {n: [] for n in RULES}
    for name in RULES:
        run[name] = jax.jit(router(moe, name)).lower(*args).compile(compiler_options())
        jax.block_until_ready(run[name](*args))
    for _ in range(repeats):
        for name in RULES:
            began = time.perf_counter()
            jax.block_until_ready(run[name](*args))
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def on_v5p(config: MoEConfig) -> dict[str, float]:
    """Milliseconds of routing `TOKENS` tokens of one layer under each rule, by XLA."""
    logits_BTE = jax.ShapeDtypeStruct((1, TOKENS, config.experts), jnp.float32)
    bias_LE = jax.ShapeDtypeStruct((1, config.experts), jnp.float32)
    found = {}
    for name in RULES:
        hlo = aot.compile_for("v5p", router(config, name), logits_BTE, bias_LE).as_text()
        found[name] = 1e3 * schedule.xla_cycles(hlo) / aot.CHIPS["v5p"].clock
    return found


def study() -> None:
    """Prints both."""
    config = tiny(lambda c: None, 0, 1)
    here, step_ms = on_this_machine(config), step_milliseconds()["step"]
    more = config.model.moe_layers * (here["quantile"] - here["none"])
    print(f"8k:tiny here: {more:.2f} ms for the balance of a step of {step_ms:.1f}:", end="")
    print(f" {100 * more / step_ms:.2f} %", flush=True)
    model = from_dict(TrainConfig, configs.load("8k:2p8t").to_dict()).model
    active = parameters(model).active / model.layers
    layer_ms = 1e3 * 6 * active * TOKENS / aot.CHIPS["v5p"].peak_flops
    v5p = on_v5p(model.moe)
    more = v5p["quantile"] - v5p["none"]
    print(f"a layer of 2p8t on v5p, {TOKENS:,} tokens: {layer_ms:.0f} ms for its products at peak;")
    print(f"by XLA {v5p['none']:.2f} ms for routing, {more:.2f} more for the balance:", end="")
    print(f" {100 * more / layer_ms:.2f} %")
