"""The language model: embedding, a stack read off the layout string, final norm, head.

The stack is cut into blocks (one, unless block residuals are on) and each block into segments:
`DDDLDDDL` is one period `DDDL` scanned twice, so that compile time follows the number of different
layers and not their number. Everything below this file is flax; everything above sees functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.data.batch import Batch
from mlmoe.layers.layer import Layer, LayerSpec, Stream
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import OUT, Named, fan_in, param
from mlmoe.layers.residual import DepthRead
from mlmoe.layers.router import RouterStats
from mlmoe.sharding import constrain
from pallas_kernels.bounded_decay import document_ids

REMAT = {  # what the backward pass may keep from a period; everything else it computes again
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Segment(NamedTuple):
    """`repeats` copies of a period of layers, in a row."""

    period: tuple[LayerSpec, ...]
    repeats: int

    @property
    def moe_layers(self) -> int:
        return self.repeats * sum(not spec.dense for spec in self.period)


def blocks(config: ModelConfig) -> list[list[Segment]]:
    """The stack as blocks of segments, in order."""
    size = config.residual.size if config.residual.kind == "block" else config.layers
    specs = [
        LayerSpec(
            letter, i < config.moe.dense_layers, config.residual.kind == "block" and i % size == 0
        )
        for i, letter in enumerate(config.letters)
    ]
    return [segments(specs[i : i + size]) for i in range(0, len(specs), size)]


def segments(specs: Sequence[LayerSpec]) -> list[Segment]:
    """Cuts a list of layers into periods that repeat, longest coverage first, shortest period."""
    found, i = [], 0
    while i < len(specs):
        best = Segment((specs[i],), 1)
        for n in range(1, (len(specs) - i) // 2 + 1):
            period, r = tuple(specs[i : i + n]), 1
            while tuple(specs[i + r * n : i + (r + 1) * n]) == period:
                r += 1
            if r > 1 and r * n > len(best.period) * best.repeats:
                best = Segment(period, r)
        found.append(best)
        i += len(best.period) * best.repeats
    return found


class Period(nn.Module):
    """The body of a scan: one period of layers. Carry: Stream; per-repeat input: bias [m, E]."""

    config: ModelConfig
    dtype: jnp.dtype
    period: tuple[LayerSpec, ...]

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        sources: tuple[jax.Array, ...],
        document_BT: jax.Array,
        positions_BT: jax.Array,
        bias_mE: jax.Array,
    ) -> tuple[Stream, RouterStats | None]:
        stats: list[RouterStats] = []
        for i, spec in enumerate(self.period):
            layer = Layer(self.config, self.dtype, spec, name=f"{spec.letter}{i}")
            bias_E = None if spec.dense else bias_mE[len(stats)]
            stream, stat = layer(stream, sources, document_BT, positions_BT, bias_E)
            stream = stream._replace(
                running_BTD=constrain(stream.running_BTD, "batch", "time", "embed")
            )
            stats += [] if stat is None else [stat]
        return stream, jax.tree.map(lambda *x: jnp.stack(x), *stats) if stats else None


class LM(nn.Module):
    """tokens [B, T] -> (final hidden [B, T, D], head [D, W], RouterStats over the MoE layers)."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        segment_ids_BT: jax.Array,
        positions_BT: jax.Array,
        bias_LE: jax.Array,
    ) -> tuple[jax.Array, jax.Array, RouterStats | None]:
        c, D, W = self.config, self.config.d_model, self.config.vocab
        width = D if c.tie_head else 1  # a tied table must also give logits of unit size
        table_WD = param(self, "embedding", fan_in(width), (W, D), "vocab embed")
        document_BT = document_ids(segment_ids_BT)
        x_BTD = jnp.take(table_WD, tokens_BT, axis=0).astype(self.dtype)
        x_BTD = constrain(x_BTD, "batch", "time", "embed")
        k = c.residual.size if c.residual.kind == "window" else 0
        stream = Stream(x_BTD, (jnp.zeros_like(x_BTD),) * k)
        sources: tuple[jax.Array, ...] = ()
        stats, row = [], 0
        for b, block in enumerate(blocks(c)):
            if c.residual.kind == "block":
                sources = (*sources, stream.running_BTD)
            for s, segment in enumerate(block):
                bias = bias_LE[row : row + segment.moe_layers]
                row += segment.moe_layers
                stream, stat = self._segment(
                    f"block{b}_{s}", segment, stream, sources, document_BT, positions_BT, bias
                )
                stats += [] if stat is None else [stat]
        x_BTD = stream.running_BTD
        if c.residual.kind == "block":
            x_BTD = DepthRead(c.norm_eps, name="final_read")((*sources, x_BTD))
        x_BTD = RMSNorm(c.norm_eps, name="final_norm")(x_BTD)
        head_DW = (
            table_WD.T if c.tie_head else param(self, "head", fan_in(D, OUT), (D, W), "embed vocab")
        )
        return (
            x_BTD,
            head_DW,
            jax.tree.map(lambda *x: jnp.concatenate(x), *stats) if stats else None,
        )

    def _segment(self, name, segment, stream, sources, document_BT, positions_BT, bias_mE):  # type: ignore[no-untyped-def]
        r, E = segment.repeats, self.config.moe.experts
        body = Period
        if self.config.remat != "none":
            body = nn.remat(Period, prevent_cse=r == 1, policy=REMAT[self.config.remat])
        if r == 1:
            period = body(self.config, self.dtype, segment.period, name=name)
            return period(stream, sources, document_BT, positions_BT, bias_mE)
        scan = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=r,
            metadata_params={nn.PARTITION_NAME: "layer"},
        )(self.config, self.dtype, segment.period, name=name)
        stream, stats = scan(stream, sources, document_BT, positions_BT, bias_mE.reshape(r, -1, E))
        return stream, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stats)


class Model(NamedTuple):
    """The model as functions and plain trees; what everything above `model.py` sees."""

    init: Callable[[jax.Array], Any]  # key -> params
    apply: Callable[[Any, jax.Array, Batch], tuple[jax.Array, jax.Array, RouterStats | None]]
    axes: Any  # tree like params: a tuple of logical axis names a leaf


def compute_dtype(name: str) -> jnp.dtype:
    """`auto` is bfloat16 on accelerators and float32 on CPU, where bf16 is emulated."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_model(config: ModelConfig) -> Model:
    """Builds init and apply. `apply(params, bias_LE, batch) -> (hidden, head, stats)`."""
    module = LM(config, compute_dtype(config.dtype))
    bias_LE = jnp.zeros((config.moe_layers, config.moe.experts))
    row = jnp.zeros((1, 2), jnp.int32)

    def boxed(key: jax.Array) -> Any:
        return module.init(key, row, row, row, bias_LE)["params"]

    axes = jax.tree.map(
        lambda box: box.names, jax.eval_shape(boxed, jax.random.key(0)), is_leaf=_is_box
    )

    def init(key: jax.Array) -> Any:
        return nn.unbox(boxed(key))

    def apply(params: Any, bias_LE: jax.Array, batch: Batch) -> Any:
        return module.apply(
            {"params": params}, batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT, bias_LE
        )

    return Model(init, apply, axes)


def _is_box(x: Any) -> bool:
    return isinstance(x, Named)
