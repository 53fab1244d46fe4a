"""The configuration below the launcher: frozen dataclasses, typed and validated.

`configs/base.py` holds every field's default and meaning; here are the types and what must hold
between fields. `from_dict` is the only way in, so a missing, unknown or mistyped key stops there.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from mlmoe.data.config import DataConfig
from mlmoe.errors import one_of, require
from mlmoe.layout import LATENT, LETTERS, PRESETS

BALANCE = ("quantile", "quantile_sign", "capacity", "sign", "aux_loss", "none")
ARCHITECTURES = ("fixed", "staged")


def positive(prefix: str, config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{prefix}.{name}={value}: must be greater than 0")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Layers F, L, R and B."""

    heads: int
    head_dim: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope_theta: float
    kv_share: int

    def __post_init__(self) -> None:
        names = [f.name for f in dataclasses.fields(self)]
        positive("model.attention", self, *names)
        for name in ("head_dim", "rope_dim"):
            value = getattr(self, name)
            near = " or ".join(str(v) for v in (value - 1, value + 1) if v > 0)
            require(
                value % 2 == 0,
                f"model.attention.{name}={value}: rotary pairs need an even width; nearest: {near}",
            )


@dataclasses.dataclass(frozen=True)
class IncrementalConfig:
    """Layers D, A and S."""

    heads: int
    key_dim: int
    value_dim: int
    slots: int
    conv_width: int
    gate_rank: int
    g_min: float
    beta_max: float
    memory_min: float
    memory_max: float

    def __post_init__(self) -> None:
        p = "model.incremental"
        positive(p, self, "heads", "key_dim", "value_dim", "slots", "conv_width", "gate_rank")
        require(
            -5.0 <= self.g_min < 0.0,
            f"{p}.g_min={self.g_min}: must be in [-5, 0); a 16-token tile spans 16 * g_min nats "
            "and exp overflows f32 at 88",
        )
        require(
            self.beta_max in (1.0, 2.0), f"{p}.beta_max={self.beta_max}: choose one of 1.0, 2.0"
        )
        require(
            1.0 / -self.g_min < self.memory_min < self.memory_max,
            f"{p}.memory_min={self.memory_min}, memory_max={self.memory_max}: need "
            f"{1.0 / -self.g_min} < memory_min < memory_max (tokens)",
        )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Channel mixers: the dense MLP and the LatentMoE."""

    activation: str
    dense_layers: int
    dense_hidden: int
    experts: int
    active: int
    latent: int
    hidden: int
    shared_hidden: int
    temperature: float
    temperature_final: float
    temperature_learned: bool
    balance: str
    balance_rate: float
    aux_weight: float
    capacity_factor: float
    reroutes: int
    transport: str
    buffer: float

    def __post_init__(self) -> None:
        p = "model.moe"
        one_of(f"{p}.activation", self.activation, ("capped", "four", "swiglu"))
        one_of(f"{p}.balance", self.balance, BALANCE)
        one_of(f"{p}.transport", self.transport, ("auto", "ragged", "gather"))
        require(
            self.buffer == 0 or self.buffer >= 1,
            f"{p}.buffer={self.buffer}: must be 0 (room for every token) or at least 1, the share "
            "of a shard under perfect balance",
        )
        names = ("dense_hidden", "experts", "active", "latent", "hidden", "shared_hidden")
        positive(p, self, *names, "temperature", "balance_rate")
        require(
            self.temperature >= 1e-3,
            f"{p}.temperature={self.temperature}: scores divided by so little are no numbers any "
            "more; nearest: 0.001",
        )
        require(
            self.temperature_final >= 0,
            f"{p}.temperature_final={self.temperature_final}: must be above 0, or 0 for constant",
        )
        require(self.aux_weight >= 0, f"{p}.aux_weight={self.aux_weight}: must be >= 0")
        require(
            self.capacity_factor >= 1,
            f"{p}.capacity_factor={self.capacity_factor}: below 1 the experts seat fewer tokens "
            "than there are choices; nearest: 1.0",
        )
        require(self.reroutes >= 0, f"{p}.reroutes={self.reroutes}: must be >= 0")
        require(self.dense_layers >= 0, f"{p}.dense_layers={self.dense_layers}: must be >= 0")
        require(self.experts > 1, f"{p}.experts={self.experts}: at least 2; nearest: 2")
        require(
            self.active < self.experts,
            f"{p}.active={self.active}: must be below {p}.experts={self.experts}; "
            f"nearest: {self.experts - 1}",
        )


@dataclasses.dataclass(frozen=True)
class ResidualConfig:
    """What joins the layers: plain sums, a window of projections, or a softmax over depth."""

    kind: str
    size: int

    def __post_init__(self) -> None:
        one_of("model.residual.kind", self.kind, ("none", "window", "block"))
        positive("model.residual", self, "size")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. `layout` is a preset name or one letter a layer."""

    layout: str
    layers: int
    vocab: int
    d_model: int
    norm_eps: float
    tie_head: bool
    vocab_chunk: int
    remat: str
    dtype: str
    attention: AttentionConfig
    incremental: IncrementalConfig
    moe: MoEConfig
    residual: ResidualConfig

    def __post_init__(self) -> None:
        positive("model", self, "layers", "vocab", "vocab_chunk", "d_model", "norm_eps")
        require(
            self.vocab % min(self.vocab, self.vocab_chunk) == 0,
            f"model.vocab={self.vocab} is not divisible by model.vocab_chunk={self.vocab_chunk}; "
            f"nearest vocab: {nearest_multiple(self.vocab, self.vocab_chunk)}",
        )
        one_of("model.remat", self.remat, ("none", "dots", "full"))
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        unknown = sorted(set(self.letters) - set(LETTERS))
        meanings = ", ".join(f"{k} ({v})" for k, v in LETTERS.items())
        require(
            not unknown,
            f"model.layout={self.layout!r}: unknown letter {''.join(unknown)!r}; use the presets "
            f"{', '.join(PRESETS)} or the letters {meanings}",
        )
        require(bool(self.layout), "model.layout is empty: use a preset or one letter a layer")
        require(
            len(self.letters) == self.layers,
            f"model.layout={self.layout!r} has {len(self.letters)} letters but model.layers="
            f"{self.layers}; set --config.model.layers={len(self.letters)}",
        )
        latent, share = sum(x in LATENT for x in self.letters), self.attention.kv_share
        near = nearest_divisors(max(latent, 1), share)
        require(
            share == 1 or (latent > 0 and latent % share == 0),
            f"model.attention.kv_share={share} does not divide the {latent} latent layers (letters "
            f"{LATENT}) of model.layout; nearest: {near}",
        )

    @property
    def letters(self) -> str:
        """The layout spelled out, one letter a layer."""
        return PRESETS[self.layout](self.layers) if self.layout in PRESETS else self.layout

    @property
    def follows(self) -> tuple[bool, ...]:
        """For each layer: whether it reads the latent of another one (kv_share)."""
        number, found = 0, []
        for letter in self.letters:
            found.append(letter in LATENT and number % self.attention.kv_share > 0)
            number += letter in LATENT
        return tuple(found)

    @property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.moe.dense_layers)


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    name: str
    lr: float
    adam_lr: float
    warmup: int
    schedule: str
    decay: float
    final_lr: float
    weight_decay: float
    clip: float
    momentum: float
    b1: float
    b2: float
    z_loss: float
    max_bad_steps: int

    def __post_init__(self) -> None:
        one_of("optim.name", self.name, ("muon", "adamw"))
        one_of("optim.schedule", self.schedule, ("cosine", "wsd"))
        positive("optim", self, "lr", "adam_lr", "clip", "max_bad_steps")
        for name in ("warmup", "weight_decay", "z_loss"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name}={value}: must be >= 0")
        for name in ("decay", "final_lr"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optim.{name}={value}: must be in [0, 1]")
        for name in ("momentum", "b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}={value}: must be in [0, 1)")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out; the rest of them go to the data axis."""

    expert: int

    def __post_init__(self) -> None:
        positive("mesh", self, "expert")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. Built by `from_dict`; hashable, so it can be a static argument of jit."""

    stage: str
    scale: str
    architecture: str
    init_from: str
    workdir: str
    seed: int
    context: int
    batch: int
    accumulate: int
    steps: int
    log_every: int
    eval_every: int
    eval_bytes: int
    save_every: int
    keep: int
    final_eval_bytes: int
    sample_tokens: int
    state_check_every: int
    state_error_max: float
    mesh: MeshConfig
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig

    def __post_init__(self) -> None:
        one_of("architecture", self.architecture, ARCHITECTURES)
        for name in ("workdir", "init_from"):
            value = getattr(self, name)
            require("://" not in value, f"{name}={value}: a URL; mount it and give its folder")
        require(0 <= self.seed < 2**31, f"seed={self.seed}: must be in [0, 2^31)")
        require(self.steps < 2**31, f"steps={self.steps}: must be below 2^31, {2**31}")
        positive("config", self, "context", "batch", "accumulate", "steps", "state_error_max")
        positive(
            "config",
            self,
            "log_every",
            "eval_every",
            "eval_bytes",
            "save_every",
            "keep",
            "final_eval_bytes",
        )
        for name in ("sample_tokens", "state_check_every"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value}: must be >= 0; 0 for none")
        require(
            self.batch % self.accumulate == 0,
            f"batch={self.batch} rows cannot be cut into accumulate={self.accumulate} equal "
            f"micro-batches; nearest batch: {nearest_multiple(self.batch, self.accumulate)}",
        )
        experts, shards = self.model.moe.experts, self.mesh.expert
        require(
            experts % shards == 0 or not self.model.moe_layers,
            f"mesh.expert={shards} does not divide model.moe.experts={experts}; nearest: "
            f"{nearest_divisors(experts, shards)}, or "
            f"--config.model.moe.experts={nearest_multiple(experts, shards)}",
        )


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` closest to `value`."""
    return max(of, round(value / of) * of)


def nearest_divisors(of: int, value: int) -> str:
    """The divisors of `of` around `value`, as words: "4 or 8"."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    return " or ".join(map(str, below + [d for d in divisors if d > value][:1]))


def check_devices(config: TrainConfig, devices: int, platform: str) -> None:
    """The devices form the mesh, have its transport, and split every micro-batch evenly.

    Raises:
      UserError: they do not; names the nearest mesh or batch that does.
    """
    require(
        devices % config.mesh.expert == 0,
        f"{devices} devices cannot be cut into groups of mesh.expert={config.mesh.expert}; "
        f"nearest: {nearest_divisors(devices, config.mesh.expert)}",
    )
    require(
        platform != "cpu" or config.mesh.expert == 1 or config.model.moe.transport != "ragged",
        "model.moe.transport='ragged': XLA has no ragged-all-to-all for CPUs; use 'gather' or "
        "'auto'",
    )
    whole = config.accumulate * devices
    require(
        config.batch % whole == 0,
        f"batch={config.batch} rows cannot be split evenly over {devices} devices"
        + (f" x {config.accumulate} micro-batches" if config.accumulate > 1 else "")
        + f"; nearest: --config.batch={nearest_multiple(config.batch, whole)}",
    )


def from_dict(cls: type, values: Mapping[str, Any], prefix: str = "config") -> Any:
    """Builds the dataclass `cls` from a nested mapping, checking every key and type.

    Raises:
      UserError: a key is missing or unknown, or a value has another type; an int is accepted for
        a float and a list for a tuple, nothing else is converted.
    """
    hints = typing.get_type_hints(cls)
    for key in values:
        require(key in hints, f"{prefix}.{key}: no such field; {prefix} has {', '.join(hints)}")
    missing = [key for key in hints if key not in values]
    require(not missing, f"{prefix}: missing {', '.join(missing)}")
    return cls(**{k: _convert(t, values[k], f"{prefix}.{k}") for k, t in hints.items()})


def _convert(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_dict(typing.cast(type, kind), value, name)
    if isinstance(kind, types.GenericAlias):  # tuple[tuple[str, str, float], ...]
        require(isinstance(value, Sequence), f"{name}={value!r}: expected a tuple")
        return tuple(tuple(v) if isinstance(v, list | tuple) else v for v in value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and type(value) is float:
        require(math.isfinite(value), f"{name}={value}: must be a finite number")
    require(type(value) is kind, f"{name}={value!r}: expected {kind.__name__}")
    return value


def to_dict(config: Any) -> dict[str, Any]:
    """The nested plain dict of a config, JSON-able, for checkpoints and comparisons."""
    return dataclasses.asdict(config)
