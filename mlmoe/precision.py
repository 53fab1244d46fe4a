"""Do recurrences keep their precision? Their states against float64, and how long they remember.

A state is a sum over all earlier tokens, so its rounding errors may add up over a long row. Layers
leave a sample of what they fed their recurrence, as the run computes it (dtype, kernels, devices);
numpy computes the same again in float64, token by token.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mlmoe.config import ModelConfig
from mlmoe.data.batch import Batch
from mlmoe.layers.router import Routing
from mlmoe.layers.sample import COLLECTION, Sample, evenly
from mlmoe.layout import INCREMENTAL
from mlmoe.metrics import Values
from mlmoe.model import LM, compute_dtype, layer_places

AT_FLOOR = 0.99  # a decay g below this share of g_min counts as at the floor
LONGEST = 1e9  # tokens; a decay of 0 would remember forever, which JSON cannot hold
QUANTILES = {"memory_q10": 0.1, "memory_q50": 0.5, "memory_q90": 0.9}


def make_probe(config: ModelConfig) -> Callable[[Any, Routing, Batch], dict[int, Sample]]:
    """(params, routing, batch) -> the sample of each incremental layer, by its number."""
    module = LM(config, compute_dtype(config.dtype))

    def probe(params: Any, routing: Routing, batch: Batch) -> dict[int, Sample]:
        inputs = (batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT)
        routing = routing.without_capacity()
        _, left = module.apply({"params": params}, *inputs, routing, mutable=[COLLECTION])
        return _by_layer(config, left.get(COLLECTION, {}))

    return probe


def _by_layer(config: ModelConfig, left: Any) -> dict[int, Sample]:
    samples = {}
    for layer, (segment, period, repeat, repeats) in enumerate(layer_places(config)):
        if config.letters[layer] in INCREMENTAL:
            (sample,) = left[segment][period]["mixer"]["sample"]
            if repeats > 1:  # scanned: stacked
                sample = jax.tree.map(lambda x: x[repeat], sample)  # noqa: B023
            samples[layer] = sample
    return samples


def measure(config: ModelConfig, samples: dict[int, Sample]) -> Values:
    """Lists with one value an incremental layer; `layer` says which they are.

    state_error: RMS of the error of the state at the row's end over the state's RMS; at_floor:
    share of decays within 1 % of g_min; memory_q*: quantiles of how long a channel remembers,
    -1/g in tokens.
    """
    values: Values = {"layer": sorted(samples), "state_error": [], "at_floor": []}
    values |= {name: [] for name in QUANTILES}
    for layer in values["layer"]:
        sample = jax.device_get(samples[layer])
        values["state_error"].append(state_error(sample))
        real_N = np.asarray(sample.document_T)[evenly(len(sample.document_T))] > 0
        g = np.asarray(sample.g_NHK, np.float64)[real_N].ravel()
        g_min = config.incremental.g_min
        values["at_floor"].append(float(np.mean(g <= AT_FLOOR * g_min)) if g.size else 0.0)
        memory = -1.0 / np.minimum(g, -1.0 / LONGEST)
        for name, quantile in QUANTILES.items():
            values[name].append(float(np.quantile(memory, quantile)) if g.size else 0.0)
    return values


def alarm(values: Values, state_error_max: float) -> str:
    """What to say of layers whose state is further from float64 than that; '' if none is."""
    found = [
        f"{error:.2g} in layer {layer}"
        for layer, error in zip(values["layer"], values["state_error"], strict=True)
        if not error <= state_error_max  # NaN, too
    ]
    if not found:
        return ""
    return (
        f"warning: the state is off from float64 by more than state_error_max={state_error_max:g} "
        f"of its size: {', '.join(found)}"
    )


def describe(values: Values) -> str:
    """A line for a check that finds nothing wrong."""
    error, floor = max(values["state_error"]), max(values["at_floor"])
    return f"state error {error:.1e}, decays at the floor {floor:.1%} (worst layer)"


def state_error(sample: Sample) -> float:
    """Of the state at the row's end, which only the row's last document has fed."""
    document_T = np.asarray(sample.document_T)
    last_T = (document_T == document_T.max()) & (document_T > 0)
    inputs = tuple(np.asarray(x)[last_T] for x in sample.inputs)
    _, want = recurrence64(inputs, zeros_like64(sample.state))
    return relative_error(sample.state, want)


def relative_error(found: Any, want: Any) -> float:
    """RMS of the difference over the RMS of `want`; of several arrays, the largest."""
    errors = []
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        rms = np.sqrt(np.mean(np.square(exact)))
        error = np.sqrt(np.mean(np.square(np.asarray(got, np.float64) - exact)))
        errors.append(float(error / max(rms, 1e-30)))
    return float(np.max(errors))  # Python's max would lose a NaN


def zeros_like64(state: Any) -> Any:
    """The float64 state before the first token."""
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float64), state)


def recurrence64(inputs: tuple[Any, ...], state: Any) -> tuple[np.ndarray, Any]:
    """One head in float64 from a sample's inputs: (o_Tc, the state after them)."""
    arrays = [np.asarray(x, np.float64) for x in inputs]
    if isinstance(state, tuple):
        return slots64(*arrays, states=state)
    return decay64(*arrays, state=state)


def decay64(
    q_TK: np.ndarray,
    k_TK: np.ndarray,
    v_Tc: np.ndarray,
    g_TK: np.ndarray,
    beta_T: np.ndarray | None = None,
    *,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The delta rule, additive without beta; `pallas_kernels/bounded_decay/ref.py` in numpy."""
    S_Kc, o_Tc, decay_TK1 = state.copy(), np.empty_like(v_Tc), np.exp(g_TK)[..., None]
    for t in range(len(v_Tc)):
        S_Kc *= decay_TK1[t]
        u_c = v_Tc[t] if beta_T is None else beta_T[t] * (v_Tc[t] - k_TK[t] @ S_Kc)
        S_Kc += k_TK[t][:, None] * u_c
        o_Tc[t] = q_TK[t] @ S_Kc
    return q_TK.shape[-1] ** -0.5 * o_Tc, S_Kc


def slots64(
    q_TK: np.ndarray,
    k_TK: np.ndarray,
    v_Tc: np.ndarray,
    s_TM: np.ndarray,
    g_TM: np.ndarray,
    *,
    states: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Slot attention; keys and values side by side in one state, for they are written alike."""
    K = q_TK.shape[-1]
    both, written = np.concatenate(states, 1), np.concatenate([k_TK, v_Tc], 1)
    o_Tc, decay_TM1 = np.empty_like(v_Tc), np.exp(g_TM)[..., None]
    for t in range(len(v_Tc)):
        both *= decay_TM1[t]
        both += s_TM[t][:, None] * written[t]
        logits_M = K**-0.5 * (both[:, :K] @ q_TK[t])
        p_M = np.exp(logits_M - logits_M.max())
        o_Tc[t] = p_M @ both[:, K:] / p_M.sum()
    return o_Tc, (both[:, :K], both[:, K:])
