"""The language model: embedding, a stack read off the layout string, final norm, head.

The stack is cut into blocks (one, unless block residuals are on) and each block into segments:
`DDDLDDDL` is one period `DDDL` scanned twice, so that compile time follows the number of different
layers and not their number. Everything below this file is flax; everything above sees functions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.data.batch import Batch
from mlmoe.layers.attention import Latent
from mlmoe.layers.balance import first_routing
from mlmoe.layers.layer import Layer, LayerSpec, Stream
from mlmoe.layers.norm import RMSNorm
from mlmoe.layers.param import OUT, Named, fan_in, param
from mlmoe.layers.residual import DepthRead
from mlmoe.layers.router import RouterStats, Routing
from mlmoe.layers.sample import COLLECTION
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
            letter=letter,
            dense=i < config.moe.dense_layers,
            starts_block=config.residual.kind == "block" and i % size == 0,
            follows=config.follows[i],
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


def layer_places(config: ModelConfig) -> Iterator[tuple[str, str, int, int]]:
    """For each layer: its segment, its name in the period, which repeat it is, of how many."""
    for b, block in enumerate(blocks(config)):
        for s, segment in enumerate(block):
            for repeat in range(segment.repeats):
                for i, spec in enumerate(segment.period):
                    yield f"block{b}_{s}", f"{spec.letter}{i}", repeat, segment.repeats


class Period(nn.Module):
    """The body of a scan: one period of layers. Carry: Stream; one routing a repeat."""

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
        routing: Routing,
    ) -> tuple[Stream, RouterStats | None]:
        stats: list[RouterStats] = []
        for i, spec in enumerate(self.period):
            layer = Layer(self.config, self.dtype, spec, name=f"{spec.letter}{i}")
            mine = None if spec.dense else _rows(routing, len(stats))
            stream, stat = layer(stream, sources, document_BT, positions_BT, mine)
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
        routing: Routing,
    ) -> tuple[jax.Array, jax.Array, RouterStats | None]:
        c, D, W = self.config, self.config.d_model, self.config.vocab
        width = D if c.tie_head else 1  # a tied table must also give logits of unit size
        table_WD = param(self, "embedding", fan_in(width), (W, D), "vocab embed")
        document_BT = document_ids(segment_ids_BT)
        x_BTD = jnp.take(table_WD, tokens_BT, axis=0).astype(self.dtype)
        x_BTD = constrain(x_BTD, "batch", "time", "embed")
        k = c.residual.size if c.residual.kind == "window" else 0
        stream = Stream(x_BTD, (jnp.zeros_like(x_BTD),) * k, self._no_latent(x_BTD))
        sources: tuple[jax.Array, ...] = ()
        stats, row = [], 0
        for b, block in enumerate(blocks(c)):
            if c.residual.kind == "block":
                sources = (*sources, stream.running_BTD)
            for s, segment in enumerate(block):
                mine = _rows(routing, slice(row, row + segment.moe_layers))
                row += segment.moe_layers
                stream, stat = self._segment(
                    f"block{b}_{s}", segment, stream, sources, document_BT, positions_BT, mine
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

    def _no_latent(self, x_BTD: jax.Array) -> Latent | None:
        """What is carried where latents are shared, until the first layer makes one."""
        a = self.config.attention
        if a.kv_share == 1:
            return None
        rows = x_BTD.shape[:2]
        return Latent(*(jnp.zeros((*rows, w), self.dtype) for w in (a.kv_rank, a.rope_dim)))

    def _segment(self, name, segment, stream, sources, document_BT, positions_BT, routing):  # type: ignore[no-untyped-def]
        r = segment.repeats
        body = Period
        if self.config.remat != "none":
            body = nn.remat(Period, prevent_cse=r == 1, policy=REMAT[self.config.remat])
        if r == 1:
            period = body(self.config, self.dtype, segment.period, name=name)
            return period(stream, sources, document_BT, positions_BT, routing)
        scan = nn.scan(
            body,
            variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=r,
            metadata_params={nn.PARTITION_NAME: "layer"},
        )(self.config, self.dtype, segment.period, name=name)
        routing = jax.tree.map(lambda x: x.reshape(r, -1, *x.shape[1:]), routing)
        stream, stats = scan(stream, sources, document_BT, positions_BT, routing)
        return stream, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stats)


class Model(NamedTuple):
    """The model as functions and plain trees; what everything above `model.py` sees."""

    init: Callable[[jax.Array], Any]  # key -> params
    apply: Callable[[Any, Routing, Batch], tuple[jax.Array, jax.Array, RouterStats | None]]
    axes: Any  # tree like params: a tuple of logical axis names a leaf


def expert_norms(config: ModelConfig, tree: Any) -> jax.Array:
    """Norm of each expert's w_in and w_out together, [L, E], in a tree shaped like the parameters.

    L in the order of the routing: a segment's repeats in turn, each with its layers.
    """
    rows = []
    for b, block in enumerate(blocks(config)):
        for s, segment in enumerate(block):
            squares_rE = []
            for i, spec in enumerate(segment.period):
                if not spec.dense:
                    layer = tree[f"block{b}_{s}"][f"{spec.letter}{i}"]["channel"]
                    w_in, w_out = layer["w_in"], layer["w_out"]
                    square = jnp.sum(w_in**2, (-1, -2, -3)) + jnp.sum(w_out**2, (-1, -2))
                    squares_rE.append(square.reshape(segment.repeats, -1))
            if squares_rE:
                rows.append(jnp.stack(squares_rE, 1).reshape(-1, config.moe.experts))
    return jnp.sqrt(jnp.concatenate(rows))


def _rows(routing: Routing, which: Any) -> Routing:
    return jax.tree.map(lambda x: x[which], routing)


def compute_dtype(name: str) -> jnp.dtype:
    """`auto` is bfloat16 on accelerators and float32 on CPU, where bf16 is emulated."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_model(config: ModelConfig) -> Model:
    """Builds init and apply. `apply(params, routing, batch) -> (hidden, head, stats)`."""
    module = LM(config, compute_dtype(config.dtype))
    routing = first_routing(config.moe, config.moe_layers)
    row = jnp.zeros((1, 2), jnp.int32)

    def boxed(key: jax.Array) -> Any:
        return module.init(key, row, row, row, routing)["params"]

    axes = jax.tree.map(
        lambda box: box.names, jax.eval_shape(boxed, jax.random.key(0)), is_leaf=_is_box
    )

    def init(key: jax.Array) -> Any:
        return nn.unbox(boxed(key))

    def apply(params: Any, routing: Routing, batch: Batch) -> Any:
        return module.apply(
            {"params": params}, batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT, routing
        )

    return Model(init, apply, axes)


def _is_box(x: Any) -> bool:
    return isinstance(x, Named)
