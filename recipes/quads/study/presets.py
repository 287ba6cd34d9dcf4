"""Prepared studies, and stress settings that can be laid over them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ALL_ARMS = ("bf16", "fp8", "naive", "qat", "symmetric", "quads", "quads_full")


@dataclass(frozen=True)
class Preset:
    """One prepared study.

    config: hydra config. seeds: how many. heldout: held-out problems; samples: responses to each, sampled at
    temperature 1. calibration: training prompts whose responses choose the residual masks before an evaluation.
    probe_every: steps between splits of the mismatch into weights, activations and engine; 0: none.
    save_every: steps between checkpoints that a killed run resumes from; 0: it starts anew. keep_weights: keep the
    final weights after their evaluation; otherwise each run is evaluated as soon as it has ended.
    """

    name: str
    about: str
    arms: tuple[str, ...] = ALL_ARMS
    seeds: int = 3
    steps: int = 30
    config: str = "quads_demo"
    policy: str | None = "outlier"
    heldout: int = 256
    samples: int = 2
    calibration: int = 64
    probe_every: int = 5
    overrides: tuple[str, ...] = ()
    save_every: int = 0
    keep_weights: bool = True
    needs_gpu: bool = False


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "quick",
            "12 to 14 minutes on 2 cores: one seed, so the mismatch shows and nothing can be tested",
            arms=("bf16", "naive", "qat", "quads"),
            seeds=1,
            steps=10,
            heldout=128,
        ),
        Preset("paper-mini", "about 90 minutes on 2 cores: all arms, three seeds", steps=22),
        Preset(
            "gpu",
            "Qwen3-30B-A3B with configs/quads.yaml: needs CUDA GPUs, a checkpoint and data",
            seeds=3,
            steps=260,
            config="quads",
            policy=None,
            heldout=512,
            samples=4,
            overrides=(
                "data.train_batch_size=256",
                "data.max_prompt_length=3072",
                "data.max_response_length=8192",
                "actor_rollout_ref.actor.ppo_mini_batch_size=128",
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
                "actor_rollout_ref.actor.optim.lr=1e-6",
                "actor_rollout_ref.actor.fsdp_config.param_offload=true",
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
                "actor_rollout_ref.model.enable_gradient_checkpointing=true",
                "actor_rollout_ref.rollout.n=16",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
                "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
                "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
                "trainer.val_before_train=false",
                "trainer.test_freq=-1",
                "trainer.nnodes=1",
            ),
            save_every=20,
            keep_weights=False,
            needs_gpu=True,
        ),
    )
}


@dataclass(frozen=True)
class Stress:
    """A harder setting. outliers: fields of policy.outliers.OutlierSettings, which need the policy `outlier`.

    terms: numbers in a problem, (fewest, most); the shipped policies were trained on 3 to 4. overrides: of hydra.
    """

    name: str
    about: str
    outliers: dict[str, float] = field(default_factory=dict)
    terms: tuple[int, int] | None = None
    overrides: tuple[str, ...] = ()


_ACTOR = "actor_rollout_ref.actor."
_LR = f"{_ACTOR}optim.lr"
_QUARTERS = (f"{_ACTOR}ppo_mini_batch_size=4", f"{_ACTOR}ppo_micro_batch_size_per_gpu=32")
_LONG = (
    "data.max_prompt_length=40",
    "data.max_response_length=88",
    "actor_rollout_ref.rollout.max_model_len=128",
)

STRESSES = {
    stress.name: stress
    for stress in (
        Stress("outliers4", "outlier channels 4 times as large as the rest", outliers={"strength": 4.0}),
        Stress("outliers64", "outlier channels 64 times as large", outliers={"strength": 64.0}),
        Stress("outliers256", "outlier channels 256 times as large", outliers={"strength": 256.0}),
        Stress(
            "outliers-many",
            "16 outlier channels per norm and 8 per expert instead of 4 and 2",
            outliers={"norm_channels": 16, "mlp_channels": 8},
        ),
        Stress(
            "outliers-mlp",
            "outliers in the experts' intermediate channels only, 16 each",
            outliers={"norm_channels": 0, "mlp_channels": 16},
        ),
        Stress("lr3e-4", "learning rate 3e-4 instead of 1e-4", overrides=(f"{_LR}=3e-4",)),
        Stress("lr1e-3", "learning rate 1e-3", overrides=(f"{_LR}=1e-3",)),
        Stress("minibatch4", "4 updates per batch, each on a quarter", overrides=_QUARTERS),
        Stress("epochs4", "4 updates per batch, each on all of it", overrides=(f"{_ACTOR}ppo_epochs=4",)),
        Stress(
            "stale16",
            "16 updates per batch: 4 passes over its quarters",
            overrides=(f"{_ACTOR}ppo_epochs=4", *_QUARTERS),
        ),
        Stress(
            "long",
            "problems of 4 to 5 terms instead of 3 to 4: longer responses, half of a kind the policy never saw",
            terms=(4, 5),
            overrides=_LONG,
        ),
    )
}


def combine(names: tuple[str, ...]) -> Stress:
    """Several stress settings as one; where two set the same thing, the later one counts. Raises KeyError."""
    outliers, terms, overrides = {}, None, []
    for name in names:
        stress = STRESSES[name]
        outliers |= stress.outliers
        terms = stress.terms or terms
        overrides += stress.overrides
    about = "; ".join(STRESSES[name].about for name in names)
    return Stress("+".join(names), about, outliers, terms, tuple(overrides))


def contradiction(names: Sequence[str]) -> tuple[str, str, str] | None:
    """Two of them that set the same thing to different values, and what; None if they add up."""
    seen: dict[str, tuple[str, object]] = {}
    for name in names:
        for what, value in _values(STRESSES[name]):
            one, before = seen.setdefault(what, (name, value))
            if before != value:
                return one, name, what
    return None


def _values(stress: Stress) -> list[tuple[str, object]]:
    """What it sets -> to which value."""
    pairs = [tuple(override.split("=", 1)) for override in stress.overrides]
    terms = [("the number of terms", stress.terms)] if stress.terms else []
    return [*((f"the outliers' {name}", value) for name, value in stress.outliers.items()), *terms, *pairs]
