"""What the quantile balance takes of a step: of 8k:tiny by the clock, of the full scale by XLA.

On this machine, steps with the balance and without it take turns, so that both see the same noise.
For v5p the router of one full-scale layer is compiled with and without the statistics of the
balance; the difference of XLA's own cycle estimates, which are too high for elementwise work, is
set against the least time that the layer's matrix products can take (6 FLOPs a parameter and token
at the chip's peak). That is an estimate of a compiler: nothing is run on a TPU.
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import configs
from experiments.ablate.training import open_setting, tiny
from mlmoe.build import compile_train, first_state, make_program, put
from mlmoe.config import MoEConfig, TrainConfig, from_dict
from mlmoe.count import parameters
from mlmoe.data.pipeline import train_batches
from mlmoe.layers import balance
from mlmoe.layers.router import route
from pallas_kernels import aot, schedule

ROUTES = ("none", "quantile")
TOKENS = 8192  # a chip's, in one step


def on_this_machine(repeats: int = 60) -> dict[str, float]:
    """Median milliseconds of a tiny step with each rule, step by step in turn."""
    setting, steps, states = open_setting(), {}, {}
    for name in ROUTES:
        config = tiny(lambda c, name=name: c.model.moe.update(balance=name), 0, 2 * repeats)
        program = make_program(config)
        steps[name] = compile_train(config, program, setting.mesh)
        states[name] = first_state(program, setting.mesh)
    sizes = {"context": config.context, "batch_size": config.batch, "seed": 0}
    batches: Any = train_batches(setting.corpus, tokenizer=setting.tokenizer, **sizes)
    batch, times = put(next(batches), setting.mesh), {name: [] for name in ROUTES}
    batches.close()
    for _ in range(repeats):
        for name in ROUTES:
            began = time.perf_counter()
            states[name], metrics = steps[name](states[name], batch)
            jax.block_until_ready(metrics)
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def on_v5p(config: MoEConfig) -> dict[str, float]:
    """Milliseconds of routing `TOKENS` tokens of one layer, statistics and update, by XLA."""
    found = {}
    for name in ROUTES:
        c = dataclasses.replace(config, balance=name)

        def step(logits_BTE: jax.Array, bias_LE: jax.Array, c: MoEConfig = c) -> Any:
            routing = balance.first_routing(c, 1)._replace(bias=bias_LE)
            one, live_BT = jax.tree.map(lambda x: x[0], routing), jnp.ones((1, TOKENS), bool)
            experts_NA, p_NA, stats = route(c, one, logits_BTE, live_BT)
            stats = jax.tree.map(lambda x: x[None], stats)
            return experts_NA, p_NA, balance.next_routing(c, routing, stats, jnp.zeros(())).bias

        logits_BTE = jax.ShapeDtypeStruct((1, TOKENS, c.experts), jnp.float32)
        bias_LE = jax.ShapeDtypeStruct((1, c.experts), jnp.float32)
        hlo = aot.compile_for("v5p", step, logits_BTE, bias_LE).as_text()
        found[name] = 1e3 * schedule.xla_cycles(hlo) / aot.CHIPS["v5p"].clock
    return found


def study() -> None:
    """Prints both."""
    here = on_this_machine()
    share = 100 * (here["quantile"] / here["none"] - 1)
    print(f"8k:tiny here: {here['none']:.1f} ms a step, {here['quantile']:.1f} with the quantile")
    print(f"balance: {share:+.1f} %", flush=True)
    config = from_dict(TrainConfig, configs.load("8k:2p8t").to_dict()).model
    active = parameters(config).active / config.layers
    layer_ms = 1e3 * 6 * active * TOKENS / aot.CHIPS["v5p"].peak_flops
    v5p = on_v5p(config.moe)
    more = v5p["quantile"] - v5p["none"]
    print(f"a layer of 2p8t on v5p, {TOKENS:,} tokens: {layer_ms:.0f} ms for its products at peak;")
    print(
        f"XLA's estimate: {v5p['none']:.2f} ms for routing, {more:.2f} more for the balance:",
        end="",
    )
    print(f" {100 * more / layer_ms:.2f} %")
