"""From the arguments of `quads study` to everything a study needs, checked before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from quads_recipe.study import arguments, command, data, folder, notes, overrides, preflight
from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import (
    PLAN,
    Plan,
    StudyError,
    digest,
    policy_digest,
    read,
    require_continued,
    settle,
    write_atomically,
)
from quads_recipe.study.presets import PRESETS, Preset, Stress, combine
from quads_recipe.words import plural

ABOUT = "about.json"
PARTS = ("train", "heldout")
"""Of own data, in the order of `--data`."""
NOT_GIVEN = "not-given"
"""The policy of a dry run without one."""


@dataclass
class Prepared:
    """A study that can start.

    policy: folder of the starting policy, None if it is made when the study starts. config: hydra configuration of its
    first run. blocks: arm -> `quads` block. own_data: (train, heldout) parquet files that were given, or None. about:
    for the report. lacking: why it can't start after all, in lines; only of a dry run, which shows the plan anywhere.
    heldout: how many problems evaluations have. notes: for the terminal.
    """

    plan: Plan
    layout: Layout
    policy: Path | None
    config: object
    blocks: dict[str, dict]
    own_data: tuple[Path, Path] | None
    about: dict = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    heldout: int = 0
    notes: tuple[str, ...] = ()


def prepare(args: argparse.Namespace) -> Prepared:
    """Checks the arguments, the folder, the policy and the data, and composes the configuration. Writes nothing.

    Raises StudyError.
    """
    from quads_recipe.study import policy

    preset, stress = PRESETS[args.preset], combine(tuple(args.stress))
    arguments.check(args)
    overrides.check(args.overrides)
    lacking = _lacking(args, preset) if preset.needs_gpu else ()
    if lacking and not args.dry_run:
        raise StudyError(lacking[0])
    name = args.policy or preset.policy or NOT_GIVEN
    outliers = stress.outliers | ({"strength": args.outlier_strength} if args.outlier_strength is not None else {})
    study = (args.out or default_folder(args, name)).resolve()
    folder.require_usable(study)
    start = None if name == NOT_GIVEN else policy.find(name, outliers, study)
    own = tuple(path.resolve() for path in args.data) if args.data else None
    plan = _plan(args, preset, stress, Path(name).name, outliers)
    inputs = Inputs(name != NOT_GIVEN, start or policy.find("natural", {}, study), own)
    configs, heldout, warning = _check(args, plan, inputs, Layout(study), not lacking)
    plan = _with_policy(plan, start, study)
    prepared = Prepared(plan, Layout(study), start, configs[plan.arms[0]], _blocks(configs), own, lacking=lacking)
    prepared.heldout = heldout
    prepared.about = _about(args, preset, prepared)
    prepared.notes = notes.lines(args, plan, inputs.policy if inputs.given else None, heldout, warning)
    return prepared


@dataclass(frozen=True)
class Inputs:
    """given: there is a policy. policy: its folder; that of another of the same shape where it has to be made. data:
    own parquet files."""

    given: bool
    policy: Path
    data: tuple[Path, Path] | None


def _check(
    args: argparse.Namespace, plan: Plan, inputs: Inputs, layout: Layout, here: bool
) -> tuple[dict[str, object], int, str | None]:
    """(arm -> hydra configuration, number of held-out problems, warning of the prompts).

    here: the study could start on this machine.
    Raises StudyError for what the runs or the evaluations would end with.
    """
    preset_only = dataclasses.replace(plan, overrides=plan.overrides[: len(plan.overrides) - len(args.overrides)])
    nothing = (Path("train.parquet"), Path("heldout.parquet"))
    files = command.Files(inputs.policy, *(inputs.data or nothing))
    run_dir = layout.study / "runs" / "any"
    if args.overrides:
        before = command.compose(preset_only, plan.arms[0], plan.seeds[0], files, run_dir)
        overrides.check_groups(args.overrides, before)
    configs = command.compose_arms(plan, files, run_dir)
    config = configs[plan.arms[0]]
    overrides.check_composed(config)
    heldout, warning = plan.heldout, None
    with preflight.environment(command.environment(plan, run_dir, run_dir / "metrics.jsonl")):
        finite = inputs.given and notes.weights_gib(inputs.policy) <= notes.READ_GIB
        preflight.check_runs(configs, args.overrides, here=here, policy=inputs.given, finite=finite)
        if inputs.data:
            heldout = preflight.check_own_data(config, args.overrides, plan.steps)
        elif here:
            preflight.check_generated(config, layout.data, plan.seeds)
        if inputs.given and (inputs.data or here):
            warning = preflight.check_prompts(config, inputs.policy, args.overrides, inputs.data, plan.terms)
    return configs, heldout, warning


def _with_policy(plan: Plan, start: Path | None, study: Path) -> Plan:
    """The plan with the policy's digest, as far as it is needed before the study starts: to continue one.

    Raises StudyError: the folder holds a study with other settings.
    """
    if not (study / PLAN).is_file():
        return plan
    there = read(study).policy_digest
    plan = dataclasses.replace(plan, policy_digest=policy_digest(start) if start else there)
    require_continued(study, plan)
    return plan


def _about(args: argparse.Namespace, preset: Preset, prepared: Prepared) -> dict:
    from quads_recipe.study import policy, report

    title = f"QUADS in miniature: {preset.name}" if not preset.needs_gpu else "QUADS: the arms on GPUs"
    start, outliers = prepared.policy, prepared.plan.outliers
    found = policy.outliers_of(start) if start else policy.settings(outliers) if outliers else None
    return report.describe(title, command_line(args), prepared.config, found)


def _blocks(configs: dict[str, object]) -> dict[str, dict]:
    from quads_recipe.derive import settings_of

    return {arm: settings_of(config).to_dict() for arm, config in configs.items()}


def _lacking(args: argparse.Namespace, preset: Preset) -> tuple[str, ...]:
    import torch

    found = []
    if not torch.cuda.is_available():
        found.append("needs CUDA GPUs, and torch sees none; on a CPU use --preset quick or paper-mini")
    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        found.append("VERL_PLATFORM=cpu is set in the environment; unset it")
    if args.policy is None or args.data is None:
        found.append("needs --policy DIR (a Qwen3-30B-A3B checkpoint) and --data TRAIN.parquet HELDOUT.parquet")
    return tuple(f"--preset {preset.name}: {line}" for line in found)


def default_folder(args: argparse.Namespace, policy: str) -> Path:
    """The same for the same kind of study, so that the same command finds its own folder again."""
    parts = ["study", args.preset, Path(policy).name, *args.stress]
    if args.outlier_strength is not None:
        parts.append(f"x{args.outlier_strength:g}")
    return Path("runs") / "-".join(parts)


def _plan(args: argparse.Namespace, preset: Preset, stress: Stress, policy: str, outliers: dict[str, float]) -> Plan:
    """Still without the policy's digest."""
    from quads_recipe.study.machine import versions

    seeds = args.seeds or preset.seeds
    changes = (*preset.overrides, *_gpus(preset), *stress.overrides, *args.overrides)
    return Plan(
        preset=preset.name,
        stress=tuple(args.stress),
        config=preset.config,
        arms=_arms(args.arms) if args.arms is not None else preset.arms,
        seeds=tuple(range(seeds)),
        steps=args.steps or preset.steps,
        policy=policy,
        policy_digest="",
        outliers=outliers,
        terms=stress.terms,
        data={part: f"{file.name} {digest(file)}" for part, file in zip(PARTS, args.data or (), strict=False)},
        overrides=changes,
        heldout=args.heldout or preset.heldout,
        samples=args.samples or preset.samples,
        calibration=preset.calibration,
        probe_every=preset.probe_every,
        save_every=preset.save_every,
        keep_weights=preset.keep_weights,
        versions=versions(),
    )


def _gpus(preset: Preset) -> tuple[str, ...]:
    if not preset.needs_gpu:
        return ()
    import torch

    return (f"trainer.n_gpus_per_node={torch.cuda.device_count()}",) if torch.cuda.is_available() else ()


def _arms(text: str) -> tuple[str, ...]:
    from quads_ops.settings import ARMS

    wanted = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [arm for arm in wanted if arm not in ARMS]
    if unknown or not wanted:
        raise StudyError(f"--arms: {unknown[0] if unknown else text!r} is no arm; use some of {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in wanted)


def commit(prepared: Prepared) -> None:
    """Makes the policy if it has to be made, writes the plan (or checks that it continues the one there) and the data.

    To be called with the lock on the folder. Raises StudyError.
    """
    from quads_recipe.study import policy

    plan, layout = prepared.plan, prepared.layout
    if made := prepared.policy is None:
        found = policy.find(plan.policy, plan.outliers, layout.study)  # by another start, in the meantime
        prepared.policy = found or policy.make(layout.study, plan.outliers, print)
    if made or not plan.policy_digest:
        prepared.plan = plan = dataclasses.replace(plan, policy_digest=policy_digest(prepared.policy))
    settle(layout.study, plan)
    write_atomically(layout.study / ABOUT, json.dumps(prepared.about, indent=1) + "\n")
    if not prepared.own_data:
        train = max(1024, plan.steps * prepared.about["prompts_per_step"])
        data.write(layout.data, plan.seeds, train, plan.heldout, plan.terms)


def describe(prepared: Prepared) -> list[str]:
    """The plan in a few lines."""
    plan, about = prepared.plan, prepared.about
    stress = f", stress {', '.join(plan.stress)}" if plan.stress else ""
    return [
        f"study: preset {plan.preset}, policy {plan.policy}{stress}, folder {prepared.layout.study}",
        f"{plural(len(plan.arms), 'arm')} ({', '.join(plan.arms)}) x {plural(len(plan.seeds), 'seed')} x "
        f"{plural(plan.steps, 'step')} of {plural(about['prompts_per_step'], 'prompt')} with "
        f"{plural(about['responses'], 'response')}",
        f"evaluation: {plural(prepared.heldout, 'held-out problem')}, {plural(plan.samples, 'response')} each, "
        "own engine and BF16",
        *prepared.notes,
    ]


def command_line(args: argparse.Namespace) -> str:
    """The command again, without folders of this machine."""
    parts = [f"quads study --preset {args.preset}"]
    if args.policy:
        parts.append(f"--policy {Path(args.policy).name}")
    for name in ("outlier_strength", "arms", "seeds", "steps", "heldout", "samples"):
        if (value := getattr(args, name)) is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            parts.append(f"--{name.replace('_', '-')} {shown}")
    parts += [f"--stress {name}" for name in args.stress]
    parts += [f"--data {' '.join(file.name for file in args.data)}"] if args.data else []
    return " ".join(parts + [f"--set {one}" for one in args.overrides])
