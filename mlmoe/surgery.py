"""The hand-over of weights from one architecture to the next: what is carried, converted, new.

    names    every parameter by layer, whatever segments the two stacks are cut into
    plan     for each tensor of the new model: where it comes from and how, or why it is refused
    apply    old train state, fresh train state -> the state to start the new stage with

Carried tensors keep their optimizer moments; converted and new ones start with fresh ones. What
cannot be carried over is named before anything is computed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlmoe.config import ModelConfig
from mlmoe.convert import CONVERTED, attention_to_incremental
from mlmoe.errors import UserError
from mlmoe.layout import INCREMENTAL, LATENT, LETTERS
from mlmoe.model import layer_places
from mlmoe.step import TrainState

# Parts that the old model may lack: at their first values they change nothing.
SWITCHED_ON = ("mixer_read/", "channel_read/", "window/", "channel/log_temperature", "final_read/")


class Move(NamedTuple):
    """What becomes of one tensor. `how`: carried, converted, new or dropped."""

    name: str
    how: str
    note: str


def by_name(config: ModelConfig, tree: Any) -> dict[str, Any]:
    """{"layer 3/mixer/w_q": array, "embedding": array} of a tree shaped like the parameters.

    Places that a tree leaves empty, as the optimizer's parts do, are left out.
    """
    flat: dict[str, Any] = {}
    for n, (segment, period, repeat, repeats) in enumerate(layer_places(config)):
        for path, leaf in _leaves(tree[segment][period]):
            flat[f"layer {n}/{path}"] = leaf if repeats == 1 else leaf[repeat]
    for key, part in tree.items():
        if not key.startswith("block"):
            flat |= {f"{key}/{path}" if path else key: leaf for path, leaf in _leaves(part)}
    return flat


def from_names(config: ModelConfig, flat: Mapping[str, Any], like: Any) -> Any:
    """The inverse of `by_name`: a tree with the structure of `like`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for n, (segment, period, _, _) in enumerate(layer_places(config)):
        numbers.setdefault((segment, period), []).append(n)

    def leaf(path: tuple[Any, ...], _: Any) -> Any:
        keys = [k.key for k in path]
        layers = numbers.get((keys[0], keys[1])) if len(keys) > 1 else None
        if layers is None:
            return flat["/".join(keys)]
        found = [flat[f"layer {n}/{'/'.join(keys[2:])}"] for n in layers]
        return found[0] if len(found) == 1 else jnp.stack(found)

    return jax.tree_util.tree_map_with_path(leaf, like)


def plan(old: ModelConfig, new: ModelConfig, old_params: Any, new_params: Any) -> list[Move]:
    """What becomes of every tensor, from shapes alone (arrays or ShapeDtypeStructs).

    Raises:
      UserError: something cannot be carried over; names each such tensor and says why.
    """
    before, after = _shapes(old, old_params), _shapes(new, new_params)
    if old.layers != new.layers:
        raise UserError(
            f"the old model has {old.layers} layers and the new one {new.layers}; a hand-over "
            f"keeps their number: --config.model.layers={old.layers}"
        )
    moves: list[Move] = []
    refused: list[Move] = []
    for name, shape in after.items():
        move = _move(old, new, name, before, shape)
        (moves if move.how != "refused" else refused).append(move)
    for name in before.keys() - after.keys():
        moves.append(_drop(old, new, name))
        if moves[-1].how == "refused":
            refused.append(moves.pop())
    if refused:
        lines = "\n  ".join(f"{m.name}: {m.note}" for m in sorted(refused))
        raise UserError(f"the hand-over cannot carry over\n  {lines}")
    return moves


def _move(
    old: ModelConfig, new: ModelConfig, name: str, before: Mapping[str, Any], shape: Any
) -> Move:
    _, letters, part = _where(old, new, name)
    if part.startswith("mixer/") and _changes_kind(*letters):
        return _into_incremental(old, new, name, part.removeprefix("mixer/"), letters)
    if name not in before:
        if part.startswith(SWITCHED_ON):
            return Move(name, "new", "switched on: zero, or a plain mean, at the start")
        if part.startswith("mixer/w_beta") and letters == ("A", "D"):
            return Move(name, "new", "the delta rule's step")
        return Move(
            name, "refused", f"the old model has no such tensor {_letters(*letters)}".rstrip()
        )
    if before[name] != shape:
        return Move(name, "refused", f"is {before[name]} in the old model, {shape} in the new one")
    note = "" if letters[0] == letters[1] or not part.startswith("mixer/") else _letters(*letters)
    return Move(name, "carried", note.strip())


def _into_incremental(
    old: ModelConfig, new: ModelConfig, name: str, part: str, letters: tuple[str, str]
) -> Move:
    """A tensor of an attention layer's successor. `F`, `L`, `R`, `B` -> `D`, `A`, `S`."""
    was, now = letters
    if was in INCREMENTAL or now not in INCREMENTAL:
        return Move(name, "refused", f"there is no way from {LETTERS[was]} to {LETTERS[now]}")
    a, i = old.attention, new.incremental
    heads, width = (a.heads, i.heads), (a.head_dim if was == "F" else a.v_dim, i.value_dim)
    if heads[0] != heads[1] or width[0] != width[1]:
        return Move(
            name,
            "refused",
            f"{heads[0]} heads with values of {width[0]} do not become {heads[1]} with values of "
            f"{width[1]}; set model.incremental.heads={heads[0]}, value_dim={width[0]}",
        )
    if part in CONVERTED[was]:
        return Move(name, "converted", f"from {LETTERS[was]}: {CONVERTED[was][part]}")
    return Move(name, "new", f"not part of {LETTERS[was]}")


def _drop(old: ModelConfig, new: ModelConfig, name: str) -> Move:
    layer, letters, part = _where(old, new, name)
    if part.startswith("mixer/") and _changes_kind(*letters):
        return Move(name, "dropped", f"its layer is now {LETTERS[letters[1]]}")
    if layer is not None and new.follows[layer] and part.startswith(("mixer/w_dkv", "mixer/kv_n")):
        return Move(name, "dropped", "the layer reads the latent of an earlier one (kv_share)")
    if part.startswith("mixer/w_beta") and letters == ("D", "A"):
        return Move(name, "dropped", "the additive rule has no step size")
    return Move(name, "refused", "the new model has no such tensor")


def apply(
    moves: list[Move], old: ModelConfig, new: ModelConfig, state: TrainState, fresh: TrainState
) -> TrainState:
    """The state before step 0 of the new stage: a pure function of two train states.

    The balance bias is carried; the temperature is the new stage's. Counts of the optimizer go on,
    so that carried moments are not taken for those of a first step.
    """
    how = {m.name: m.how for m in moves}
    source, made = by_name(old, state.params), by_name(new, fresh.params)
    carried = [n for n in made if how[n] == "carried"]
    flat = made | {n: source[n] for n in carried}
    for n, (was, now) in enumerate(zip(old.letters, new.letters, strict=True)):
        if _changes_kind(was, now):
            flat |= attention_to_incremental(old, new, n, source, made)
    inner = _moments(state.opt_state, fresh.opt_state, old, new, carried)
    return fresh._replace(
        params=from_names(new, flat, fresh.params),
        opt_state=inner,
        routing=fresh.routing._replace(bias=state.routing.bias),
    )


def _moments(state: Any, fresh: Any, old: ModelConfig, new: ModelConfig, carried: list[str]) -> Any:
    """The optimizer's state with what it keeps of the carried tensors from `state`."""
    is_params = lambda x: isinstance(x, dict) and "embedding" in x  # noqa: E731
    old_parts = jax.tree.leaves(state, is_leaf=is_params)
    new_parts, structure = jax.tree.flatten(fresh, is_leaf=is_params)
    if len(old_parts) != len(new_parts):  # another optimizer: nothing of it fits
        return fresh
    out = []
    for was, now in zip(old_parts, new_parts, strict=True):
        if is_params(now):
            source, flat = by_name(old, was), by_name(new, now)
            flat |= {n: source[n] for n in carried if n in source and n in flat}
            out.append(from_names(new, flat, now))
        else:
            out.append(was if jnp.issubdtype(now.dtype, jnp.integer) else now)
    return jax.tree.unflatten(structure, out)


def describe(moves: list[Move], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """One line a tensor that is not simply carried, and the totals."""
    lines = [
        f"  {m.name} {list(shapes.get(m.name, ()))}: {m.how}{', ' + m.note if m.note else ''}"
        for m in sorted(moves, key=_order)
        if m.how != "carried" or m.note
    ]
    sizes = {how: sum(math.prod(shapes.get(m.name, ())) for m in moves if m.how == how)
             for how in ("carried", "converted", "new")}  # fmt: skip
    total = ", ".join(f"{n:,} {how}" for how, n in sizes.items() if n)
    return "\n".join([*lines, f"  parameters: {total}"])


def _order(move: Move) -> tuple[int, str]:
    """The embedding and its like first, then layer by layer."""
    layer = _layer_of(move.name)
    return -1 if layer is None else layer, move.name


def _shapes(config: ModelConfig, tree: Any) -> dict[str, tuple[int, ...]]:
    named = jax.eval_shape(lambda t: by_name(config, t), tree)
    return {name: x.shape for name, x in named.items()}


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield "/".join(k.key for k in path), leaf


def _layer_of(name: str) -> int | None:
    head = name.partition("/")[0]
    return int(head.removeprefix("layer ")) if head.startswith("layer ") else None


def _where(
    old: ModelConfig, new: ModelConfig, name: str
) -> tuple[int | None, tuple[str, str], str]:
    """A tensor's layer, that layer's letters before and after, and its name within the layer."""
    layer = _layer_of(name)
    if layer is None:
        return None, ("", ""), name
    return layer, (old.letters[layer], new.letters[layer]), name.partition("/")[2]


def _changes_kind(was: str, now: str) -> bool:
    """Whether two letters have other parameters: all latent ones share theirs, so do D and A."""
    kinds = [next((k for k in (LATENT, "DA") if x in k), x) for x in (was, now)]
    return kinds[0] != kinds[1]


def _letters(was: str, now: str) -> str:
    return f"({LETTERS[was]} -> {LETTERS[now]})" if was != now else ""
