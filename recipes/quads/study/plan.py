"""What a study does: its settings in one place, written to plan.json, and compared when the study is started again."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quads_ops.settings import ARMS
from quads_recipe.paths import given_folder
from quads_recipe.study.reading import (
    StudyError,
    many,
    number,
    one_of,
    optional,
    read_object,
    table,
    text,
    truth,
    whole,
)

PLAN = "plan.json"
POLICY, POLICY_PART = "policy", "policy.part"
LOCK = ".lock"
"""What is there before the plan: a starting policy made for a study, also one that was not finished, and the lock."""
FORMAT = 1
# These say how much of a study there is, not what one run of it is; they may grow.
GROWING = ("arms", "seeds")
# Changes nothing about a run.
FREE = ("keep_weights",)


@dataclass(frozen=True)
class Plan:
    """All settings of a study. Every run of it is one arm with one seed.

    policy: its name, or the folder's. policy_digest: SHA-256 of its weights and configuration. outliers: fields of
    OutlierSettings where the policy was made for this study. data: name and digest of the own parquet files `train`
    and `heldout`; empty for generated problems. overrides: of hydra, the same for all arms. The rest is explained in
    presets.Preset.
    """

    preset: str
    stress: tuple[str, ...]
    config: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    policy: str
    policy_digest: str
    outliers: dict[str, float]
    terms: tuple[int, int] | None
    data: dict[str, str]
    overrides: tuple[str, ...]
    heldout: int
    samples: int
    calibration: int
    probe_every: int
    save_every: int
    keep_weights: bool
    versions: dict[str, str]
    format: int = FORMAT

    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed) in the order they are trained: a seed is complete before the next one begins."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


def to_json(plan: Plan) -> str:
    return json.dumps(dataclasses.asdict(plan), indent=1) + "\n"


_FIELDS = {
    "preset": text,
    "stress": many(text, 0),
    "config": text,
    "arms": many(one_of(tuple(ARMS)), distinct=True),
    "seeds": many(whole(0), distinct=True),
    "steps": whole(1),
    "policy": text,
    "policy_digest": text,
    "outliers": table(number),
    "terms": optional(many(whole(1), 2, 2)),
    "data": table(text),
    "overrides": many(text, 0),
    "heldout": whole(1),
    "samples": whole(1),
    "calibration": whole(0),
    "probe_every": whole(0),
    "save_every": whole(0),
    "keep_weights": truth,
    "versions": table(text),
    "format": whole(FORMAT, FORMAT),
}


def _from_values(values: Mapping) -> Plan:
    tuples = ("stress", "arms", "seeds", "terms", "overrides")
    return Plan(**{k: tuple(v) if k in tuples and v is not None else v for k, v in values.items()})


def read(folder: Path) -> Plan:
    """The plan of a study folder. Raises StudyError if there is none."""
    file = folder / PLAN
    if not file.is_file():
        raise StudyError(f"{folder} holds no {PLAN}; give the folder of a study")
    remedy = "give another --out, or restore the file from a backup"
    values = read_object(file, remedy)
    if values.get("format") != FORMAT or values.keys() != _FIELDS.keys():
        raise StudyError(f"{file}: was written by another version of `quads study`; give another --out")
    return _from_values(read_object(file, remedy, _FIELDS))


def differences(there: Plan, asked: Plan) -> list[str]:
    """What keeps the asked study from continuing the one that is there, one line a field."""
    old, new = dataclasses.asdict(there), dataclasses.asdict(asked)
    lines = []
    for name in old:
        if name in FREE:
            continue
        if name in GROWING:
            if missing := [value for value in old[name] if value not in new[name]]:
                lines.append(f"{name}: the study has {missing}, not asked for now; it may only grow")
        elif isinstance(old[name], dict):
            lines += _dict_differences(name, old[name], new[name])
        elif old[name] != new[name]:
            lines.append(f"{name}: {_shown(old[name])} there, {_shown(new[name])} asked for")
    return lines


def _dict_differences(name: str, old: Mapping, new: Mapping) -> list[str]:
    keys = dict.fromkeys([*old, *new])
    return [
        f"{name}.{key}: {_shown(old.get(key))} there, {_shown(new.get(key))} asked for"
        for key in keys
        if old.get(key) != new.get(key)
    ]


def _shown(value) -> str:
    return "none" if value is None else str(list(value) if isinstance(value, tuple) else value)


def settle(folder: Path, asked: Plan) -> Plan:
    """Writes the plan of a new study, or checks that the asked one continues the one that is there.

    Raises StudyError: the folder belongs to another study (names every field), or holds something else.
    """
    require_continued(folder, asked)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PLAN, to_json(asked))
    return asked


def require_continued(folder: Path, asked: Plan) -> None:
    """Raises StudyError unless the folder is free, or holds the study that the asked one continues."""
    require_ours(folder)
    if (folder / PLAN).is_file() and (lines := differences(read(folder), asked)):
        raise StudyError(
            f"--out: {folder} holds a study with other settings; give another folder, or the same settings:\n  "
            + "\n  ".join(lines)
        )


def require_ours(folder: Path) -> None:
    """Raises StudyError if `folder` is a file, or holds other things than a study."""
    try:
        given_folder(folder)
    except argparse.ArgumentTypeError as error:
        raise StudyError(f"--out: {error}") from None
    if (
        folder.is_dir()
        and not (folder / PLAN).is_file()
        and any(file.name not in (POLICY, POLICY_PART, LOCK) for file in folder.iterdir())
    ):
        raise StudyError(f"--out: {folder} is not empty and holds no {PLAN}; give another folder")


def write_atomically(path: Path, text: str) -> None:
    """The file is there whole or not at all, whenever the program is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def digest(*files: Path) -> str:
    """SHA-256 over files, their names included, as hexadecimal digits."""
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                total.update(block)
    return total.hexdigest()


def policy_digest(folder: Path) -> str:
    """Of what determines a policy: configuration, weights, tokenizer. Raises StudyError if there are no weights."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise StudyError(f"--policy: {folder} has no *.safetensors; give a Hugging Face checkpoint folder")
    named = [
        folder / name for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
    ]
    return digest(*weights, *(file for file in named if file.is_file()))
