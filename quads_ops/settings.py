"""The one block of settings, read by the trainer and by the rollout, so that they can't disagree.

`QuadsSettings.from_dict` takes the `quads:` block of the hydra config. `arm` sets one of the paper's combinations;
single fields override it. A wrong value raises `SettingsError` with the field, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ACTOR_MODES = ("none", "w4a16", "w4a4")
ROLLOUT_MODES = ("bf16", "fp8", "w4a16", "w4a4")
GRANULARITIES = ("block", "channel")
SCOPES = ("step", "token")
SCORES = ("residual", "weighted", "sensitivity")
ALLOCATIONS = ("uniform", "sensitivity")
TARGET_SETS = ("all_linear", "experts")

# arm: (actor.mode, rollout.mode, rollout.residual.ratio)
ARMS: dict[str, tuple[str, str, float]] = {
    "bf16": ("none", "bf16", 0.0),
    "fp8": ("none", "fp8", 0.0),
    "naive": ("none", "w4a4", 0.0),
    "qat": ("w4a16", "w4a4", 0.0),
    "symmetric": ("w4a4", "w4a4", 0.0),
    "quads": ("w4a16", "w4a4", 0.5),
    "quads_full": ("w4a16", "w4a4", 1.0),
}


class SettingsError(ValueError):
    """A wrong setting: names the field, the value and the remedy."""

    def __init__(self, name: str, value: Any, remedy: str):
        super().__init__(f"{name} = {value!r}: {remedy}")
        self.name, self.value, self.remedy = name, value, remedy


def _choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise SettingsError(name, value, f"must be one of {', '.join(allowed)}")
    return value


def _mapping(name: str, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
    """A copy of `value` as a dict; unknown keys are an error, because a misspelt setting would silently do nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SettingsError(name, value, f"must be a mapping with the keys {', '.join(allowed)}")
    for key in value:
        if key not in allowed:
            raise SettingsError(f"{name}.{key}", value[key], f"no such setting; {name} has {', '.join(allowed)}")
    return dict(value)


def _number(name: str, value: Any, low: float, high: float, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise SettingsError(name, value, remedy)
    return float(value)


def _whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise SettingsError(name, value, f"must be a whole number, {low} or more")


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(name, value, "must be true or false")


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SettingsError(name, value, "must be a list of module names or patterns 're:...'")
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise SettingsError(name, pattern, "every pattern is a non-empty string: a module name or 're:...'")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class ResidualSettings:
    """Residual activation compensation: which part of the activation's quantization residual gets a second product."""

    ratio: float = 0.0
    """Share of the channels compensated, in [0, 1]. 0 is plain W4A4, 1 every channel (needs no mask)."""
    granularity: str = "block"
    """`block`: units of 16 channels, saves FLOPs on a GPU. `channel`: single channels, more exact, saves none."""
    scope: str = "step"
    """`step`: one mask per layer, frozen between two weight syncs. `token`: chosen for every token, saves no FLOPs."""
    score: str = "residual"
    """`residual`: sum of r^2. `weighted`: r^2 times the squared norm of the weights it meets. `sensitivity`: r^2 times
    the squared gradient of the trainer's logprobs."""
    allocation: str = "uniform"
    """`uniform`: `ratio` in every layer. `sensitivity`: `ratio` of the extra GEMM FLOPs of all layers together, where
    the score per FLOP is largest."""
    ema: float = 0.5
    """Weight of the past in the moving average of the score, in [0, 1)."""

    def __post_init__(self):
        prefix = "quads.rollout.residual."
        _number(prefix + "ratio", self.ratio, 0, 1, "must be in [0, 1]: 0 = plain W4A4, 0.5 = the paper, 1 = all")
        _choice(prefix + "granularity", self.granularity, GRANULARITIES)
        _choice(prefix + "scope", self.scope, SCOPES)
        _choice(prefix + "score", self.score, SCORES)
        if not 0 <= _number(prefix + "ema", self.ema, 0, 1, "must be in [0, 1)") < 1:
            raise SettingsError(prefix + "ema", self.ema, "must be below 1, or the mask would never move")
        if self.scope == "token" and self.score != "residual":
            raise SettingsError(prefix + "score", self.score, "a mask per token is chosen by `residual` only")
        _choice(prefix + "allocation", self.allocation, ALLOCATIONS)
        if self.allocation == "sensitivity" and self.score != "sensitivity":
            raise SettingsError(
                prefix + "allocation",
                self.allocation,
                f"compares layers by their gradients; set {prefix}score=sensitivity too (it is {self.score})",
            )

    @property
    def frozen(self) -> bool:
        """True if a mask is in use that stays between syncs: 0 < ratio < 1, chosen per step."""
        return 0 < self.ratio < 1 and self.scope == "step"

    def require_kernels(self) -> None:
        """Raise SettingsError unless products on packed operands can do this.

        How many blocks a layer compensates is a number that kernels, and the CUDA graphs that hold them, have from the
        start, and that the experts of a layer have in common.
        """
        if self.frozen and self.allocation != "uniform":
            raise SettingsError(
                "quads.rollout.residual.allocation",
                self.allocation,
                "runs on a CPU only: on a GPU the number of blocks that a layer compensates can't change between "
                "syncs. Use uniform (score sensitivity goes with it), or quads.rollout.residual.ratio=1",
            )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How the vLLM rollout multiplies the targeted matrices."""

    mode: str = "w4a4"
    """`bf16`: not quantized. `fp8`: W8A8 (E4M3). `w4a16`: NVFP4 weights. `w4a4`: NVFP4 weights and activations."""
    residual: ResidualSettings = field(default_factory=ResidualSettings)
    warmup: int = 32
    """Training prompts that the first step's masks are chosen from; 0: they come from the weights alone."""

    def __post_init__(self):
        _choice("quads.rollout.mode", self.mode, ROLLOUT_MODES)
        _whole("quads.rollout.warmup", self.warmup, 0)
        if self.residual.ratio > 0 and self.mode != "w4a4":
            raise SettingsError(
                "quads.rollout.residual.ratio",
                self.residual.ratio,
                f"needs quads.rollout.mode=w4a4 (it is {self.mode}): nothing else has an activation residual",
            )


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """How the FSDP actor computes with the targeted matrices."""

    mode: str = "w4a16"
    """`none`: full precision. `w4a16`: weights fake-quantized to NVFP4. `w4a4`: weights and activations."""

    def __post_init__(self):
        _choice("quads.actor.mode", self.mode, ACTOR_MODES)


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The probe that splits the mismatch into weights, activations and kernels while training."""

    every: int = 0
    """Every how many steps it runs; 0: never."""
    sequences: int = 32
    """How many sequences of the step it looks at, at most."""
    layers: bool = False
    """Also measure the error of every quantized product (one more forward, product by product)."""

    def __post_init__(self):
        _whole("quads.probe.every", self.every, 0)
        _whole("quads.probe.sequences", self.sequences, 1)
        _switch("quads.probe.layers", self.layers)
        if self.layers and not self.every:
            raise SettingsError("quads.probe.layers", True, "is part of the probe; set quads.probe.every to 1 or more")


@dataclass(frozen=True, kw_only=True)
class SensitivitySettings:
    """How the trainer measures the gradients behind `rollout.residual.score: sensitivity`; without that, nothing."""

    every: int = 5
    """Every how many steps; in a run's first step always."""
    sequences: int = 32
    """How many sequences of the step it looks at, at most."""
    ema: float = 0.5
    """Weight of the past in the moving average of the squared gradients, in [0, 1)."""

    def __post_init__(self):
        prefix = "quads.sensitivity."
        _whole(prefix + "every", self.every, 1)
        _whole(prefix + "sequences", self.sequences, 1)
        if not 0 <= _number(prefix + "ema", self.ema, 0, 1, "must be in [0, 1)") < 1:
            raise SettingsError(prefix + "ema", self.ema, "must be below 1, or no new gradient would count")


@dataclass(frozen=True, kw_only=True)
class AlarmSettings:
    """When the log warns that rollout and actor drift apart. docs/metrics.md says why the defaults are as they are."""

    enabled: bool = True
    error: float = 1.05
    """Factor of probability: warns while mean |d| is above log(error). 0: never."""
    growth: float = 2.0
    """Warns while mean |d| is above so many times what it was in the run's first steps. 0: never."""
    kl: float = 0.01
    """Warns while the k3 estimate of KL(rollout || actor) is above it, in nats. 0: never."""
    baseline: int = 5
    """How many steps the run's own baseline of mean |d| is taken from."""
    window: int = 5
    """How many steps a median is taken over; a single bad step warns of nothing."""
    stuck: int = 20
    """After how many steps a mask that still comes from the weights is worth a warning."""

    def __post_init__(self):
        prefix = "quads.alarms."
        _switch(prefix + "enabled", self.enabled)
        for name in ("error", "growth"):
            value = _number(prefix + name, getattr(self, name), 0, 1000, "must be a factor above 1, or 0 for never")
            if 0 < value <= 1:
                raise SettingsError(prefix + name, value, "must be a factor above 1, or 0 for never")
        _number(prefix + "kl", self.kl, 0, 100, "must be in nats, between 0 (never) and 100")
        for name in ("baseline", "window", "stuck"):
            _whole(prefix + name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class QuadsSettings:
    """The whole `quads:` block."""

    arm: str = "quads"
    targets: str | tuple[str, ...] = "all_linear"
    """`all_linear`, `experts`, or a list of module names and `re:` patterns. Embeddings, lm_head, router gates and
    shared-expert gates are never quantized."""
    exclude: tuple[str, ...] = ()
    """Module names and `re:` patterns taken out of the targets."""
    group_size: int = 16
    actor: ActorSettings = field(default_factory=ActorSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    sensitivity: SensitivitySettings = field(default_factory=SensitivitySettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    sync_timeout_s: float = 50.0
    """Longest wait in seconds for the rollout to take one weight bucket; after it the run ends with the cause."""

    def __post_init__(self):
        _choice("quads.arm", self.arm, tuple(ARMS))
        if isinstance(self.targets, str):
            _choice("quads.targets", self.targets, TARGET_SETS)
        elif not self.targets:
            raise SettingsError("quads.targets", self.targets, "an empty list quantizes nothing; use arm bf16 for that")
        if self.group_size != 16:
            raise SettingsError("quads.group_size", self.group_size, "NVFP4 has blocks of 16; leave it at 16")
        _number("quads.sync_timeout_s", self.sync_timeout_s, 1, 3600, "must be between 1 and 3600 seconds")

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> QuadsSettings:
        """Settings from the `quads:` block; `None` and missing fields take the arm's or the default value.

        Raises:
            SettingsError: unknown key, wrong type, or a value outside its range.
        """
        top = _mapping("quads", block, _names(cls))
        probe = _mapping("quads.probe", top.get("probe"), _names(ProbeSettings))
        sensitivity = _mapping("quads.sensitivity", top.get("sensitivity"), _names(SensitivitySettings))
        alarms = _mapping("quads.alarms", top.get("alarms"), _names(AlarmSettings))
        actor = _mapping("quads.actor", top.get("actor"), _names(ActorSettings))
        rollout = _mapping("quads.rollout", top.get("rollout"), _names(RolloutSettings))
        residual = _mapping("quads.rollout.residual", rollout.get("residual"), _names(ResidualSettings))
        arm = _choice("quads.arm", _default(top.get("arm"), "quads"), tuple(ARMS))
        actor_mode, rollout_mode, ratio = ARMS[arm]
        overridden = _default(rollout.get("mode"), rollout_mode)
        if overridden != "w4a4" and residual.get("ratio") is None:
            ratio = 0.0  # the arm's ratio belongs to its own mode; an explicit one is checked below
        targets = _default(top.get("targets"), "all_linear")
        return cls(
            arm=arm,
            targets=targets if isinstance(targets, str) else _patterns("quads.targets", targets),
            exclude=_patterns("quads.exclude", _default(top.get("exclude"), ())),
            group_size=_default(top.get("group_size"), 16),
            actor=ActorSettings(mode=_default(actor.get("mode"), actor_mode)),
            rollout=RolloutSettings(
                mode=overridden,
                residual=ResidualSettings(**{"ratio": ratio, **_given(residual)}),
                **_given({"warmup": rollout.get("warmup")}),
            ),
            probe=ProbeSettings(**_given(probe)),
            sensitivity=SensitivitySettings(**_given(sensitivity)),
            alarms=AlarmSettings(**_given(alarms)),
            **_given({"sync_timeout_s": top.get("sync_timeout_s")}),
        )

    @property
    def measures_gradients(self) -> bool:
        """Whether the rollout has masks that the trainer's gradients choose."""
        residual = self.rollout.residual
        return residual.frozen and residual.score == "sensitivity"

    def to_dict(self) -> dict[str, Any]:
        """Plain dict (JSON and YAML safe); `from_dict(to_dict())` gives equal settings."""
        block = asdict(self)
        block["targets"] = self.targets if isinstance(self.targets, str) else list(self.targets)
        block["exclude"] = list(self.exclude)
        return block

    def vllm_quantization_config(self) -> dict[str, Any]:
        """What vLLM gets as `hf_overrides.quantization_config` (see quads_ops.vllm_method)."""
        block = self.to_dict()
        return {
            "quant_method": "quads_nvfp4",
            "mode": self.rollout.mode,
            "residual": block["rollout"]["residual"],
            "targets": block["targets"],
            "exclude": block["exclude"],
            "group_size": self.group_size,
        }


def _names(settings: type) -> tuple[str, ...]:
    """The fields of a dataclass: the keys of its mapping."""
    return tuple(f.name for f in fields(settings))


def _default(value: Any, default: Any) -> Any:
    """Only None means "not given": false or an empty text is a wrong value, not a wish for the default."""
    return default if value is None else value


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
