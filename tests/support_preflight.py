"""A model, data, and the demo's configuration over them, for tests of what is refused before Ray starts."""

from __future__ import annotations

import copy
from pathlib import Path

import pandas
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from support_models import save_checkpoint

ROOT = Path(__file__).parents[1]
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
ROW = {
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def save_data(file: Path, *without: str, rows: int = 64, **columns) -> Path:
    """A parquet as verl reads it, less the columns `without`, plus `columns`."""
    row = {key: value for key, value in (ROW | columns).items() if key not in without}
    pandas.DataFrame([row] * rows).to_parquet(file)
    return file


def save_inputs(folder: Path, family: str = "qwen3_moe") -> tuple[Path, Path]:
    """(checkpoint, data)."""
    return save_checkpoint(folder / "model", family), save_data(folder / "data.parquet")


def overrides_for(inputs: tuple[Path, Path], *overrides: str) -> list[str]:
    model, data = inputs
    files = [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={model}"]
    return [*files, f"hydra.run.dir={data.parent}/hydra", *overrides]


def compose_config(inputs: tuple[Path, Path], *overrides: str, config: str = "quads_demo") -> DictConfig:
    """As a user's command line makes it."""
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose(config, overrides_for(inputs, *overrides), return_hydra_config=True)


def overridden(config: DictConfig, *overrides: str) -> DictConfig:
    """A copy with what a command line sets, read by hydra's parser; far quicker than composing again."""
    config = copy.deepcopy(config)
    with open_dict(config):
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            if override.is_delete():
                del config[override.key_or_group]
            else:
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return config


def changed(config: DictConfig, **values) -> DictConfig:
    """A copy with other values; `a__b` stands for `a.b`."""
    config = copy.deepcopy(config)
    with open_dict(config):
        for name, value in values.items():
            OmegaConf.update(config, name.replace("__", "."), value, merge=False, force_add=True)
    return config


def of(prefix: str, **values) -> dict:
    """`values` with the keys below `prefix`, for `changed`."""
    return {f"{prefix}{name}".replace(".", "__"): value for name, value in values.items()}
