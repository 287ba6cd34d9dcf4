"""From the arguments of `quads study` to everything a study needs, checked before anything starts."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from quads_recipe.study import command, data
from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import (
    Plan,
    StudyError,
    digest,
    policy_digest,
    require_ours,
    settle,
    write_atomically,
)
from quads_recipe.study.presets import PRESETS, Preset, Stress, combine

ABOUT = "about.json"
NOT_GIVEN = "not-given"
"""The policy of a dry run without one."""


@dataclass
class Prepared:
    """A study that can start.

    policy: folder of the starting policy. config: hydra configuration of its first run. blocks: arm -> `quads` block.
    own_data: (train, heldout) parquet files that were given, or None. about: for the report. lacking: why it can't
    start after all, in lines; only of a dry run, which shows the plan anywhere.
    """

    plan: Plan
    layout: Layout
    policy: Path
    config: object
    blocks: dict[str, dict]
    own_data: tuple[Path, Path] | None
    about: dict = field(default_factory=dict)
    lacking: tuple[str, ...] = ()


def prepare(args: argparse.Namespace) -> Prepared:
    """Checks the arguments and the policy and composes the configuration. Writes nothing, but for a policy that has to
    be made with other outliers.

    Raises StudyError, or FileNotFoundError for a policy that isn't there.
    """
    from quads_recipe.study import policy, report

    preset, stress = PRESETS[args.preset], combine(tuple(args.stress))
    lacking = _check(args, preset)
    name = args.policy or preset.policy or NOT_GIVEN
    outliers = stress.outliers | ({"strength": args.outlier_strength} if args.outlier_strength is not None else {})
    study = (args.out or default_folder(args, name)).resolve()
    require_ours(study)
    folder = Path(name) if name == NOT_GIVEN else policy.resolve(name, outliers, study, print)
    plan = _plan(args, preset, stress, Path(name).name, folder, outliers)
    own = tuple(path.resolve() for path in args.data) if args.data else None
    files = command.Files(folder, *(own or (Path("train.parquet"), Path("heldout.parquet"))))
    config, blocks = _compose(plan, files, study)
    prepared = Prepared(plan, Layout(study), folder, config, blocks, own, lacking=lacking)
    title = f"QUADS in miniature: {preset.name}" if not preset.needs_gpu else "QUADS: the arms on GPUs"
    prepared.about = report.describe(title, command_line(args), config, policy.outliers_of(folder))
    return prepared


def _check(args: argparse.Namespace, preset: Preset) -> tuple[str, ...]:
    """What a dry run lacks to be a study. Raises StudyError for what no run can be planned with."""
    lacking = _lacking(args, preset) if preset.needs_gpu else ()
    if lacking and not args.dry_run:
        raise StudyError(lacking[0])
    own = args.policy not in (None, "natural", "outlier")
    if not preset.needs_gpu and args.data is None and own and not Path(args.policy).is_dir():
        raise StudyError(f"--policy: {args.policy!r} is neither natural, outlier nor a folder")
    for name, least in (("seeds", 1), ("steps", 1), ("heldout", 2), ("samples", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise StudyError(f"--{name}: {value} is too few; give {least} or more")
    for override in args.overrides:
        if "=" not in override:
            raise StudyError(f"--set: {override!r} has no '='; write it as key=value")
    for file in args.data or ():
        if not file.is_file():
            raise StudyError(f"--data: {file}: no such file; give two verl parquet files")
    if args.data and combine(tuple(args.stress)).terms:
        raise StudyError("--stress: longer problems are generated, which --data replaces; leave one of them out")
    return lacking


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


def _plan(
    args: argparse.Namespace, preset: Preset, stress: Stress, policy: str, folder: Path, outliers: dict[str, float]
) -> Plan:
    from quads_recipe.study.machine import versions

    seeds = args.seeds or preset.seeds
    overrides = (*preset.overrides, *_gpus(preset), *stress.overrides, *args.overrides)
    return Plan(
        preset=preset.name,
        stress=tuple(args.stress),
        config=preset.config,
        arms=_arms(args.arms) if args.arms is not None else preset.arms,
        seeds=tuple(range(seeds)),
        steps=args.steps or preset.steps,
        policy=policy,
        policy_digest="" if policy == NOT_GIVEN else policy_digest(folder),
        outliers=outliers,
        terms=stress.terms,
        data={file.name: digest(file) for file in args.data or ()},
        overrides=overrides,
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


def _compose(plan: Plan, files: command.Files, study: Path):
    """(configuration of the first run, arm -> `quads` block). Raises StudyError for a setting that is refused."""
    from omegaconf import OmegaConf

    from quads_ops.settings import QuadsSettings, SettingsError

    config = command.compose(plan, plan.arms[0], plan.seeds[0], files, study / "runs" / "any")
    block = OmegaConf.to_container(config.quads, resolve=True)
    try:
        return config, {arm: QuadsSettings.from_dict(block | {"arm": arm}).to_dict() for arm in plan.arms}
    except SettingsError as error:
        raise StudyError(f"--set: {error}") from None


def commit(prepared: Prepared) -> None:
    """Writes the plan (or checks that it continues the one there) and the data. Raises StudyError."""
    plan, layout = prepared.plan, prepared.layout
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
        f"{len(plan.arms)} arms ({', '.join(plan.arms)}) x {len(plan.seeds)} seeds x {plan.steps} steps of "
        f"{about['prompts_per_step']} prompts with {about['responses']} responses",
        f"evaluation: {plan.heldout} held-out problems, {plan.samples} responses each, own engine and BF16",
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
