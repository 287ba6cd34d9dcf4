"""What main_ppo checks before Ray starts, checked for a study before its first run: for every arm, and once.

The checks are main_ppo's own. What the study itself reads of the data comes with them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from quads_ops.compat import UnsupportedVersion
from quads_ops.settings import SettingsError
from quads_recipe.analysis.prompts import Prompt, PromptError, fitting, read_prompts, tokenize, unknown_warning
from quads_recipe.study import data, overrides
from quads_recipe.study.plan import StudyError


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Of a run, while its configuration is checked: some of verl's modules read it when they are imported."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def check_runs(
    configs: Mapping[str, DictConfig], given: Sequence[str], *, here: bool, policy: bool, finite: bool = False
) -> None:
    """The configuration of every arm, and the policy with each.

    Args:
        configs: arm -> hydra configuration of a run.
        given: of `--set`.
        here: the runs would start on this machine, which is checked too.
        policy: there is one.
        finite: look for NaN and infinity in all of its weights, too.

    Raises:
        StudyError.
    """
    from quads_recipe import derive, preflight, preflight_model, preflight_ray

    model = None
    for arm, config in configs.items():
        with _explained(given, "" if config is next(iter(configs.values())) else f" (arm {arm})"):
            settings = derive.settings_of(config)
            if here:
                preflight.check_environment(config)
            preflight.check_config(config, settings, data=False)
            if policy:
                model = model or preflight_model.build(config)
                derive.check_matrices(config, settings, model)
            if here:
                preflight_ray.check(config)
    if policy:
        with _explained(given):
            derive.check_folder(config, model, finite=finite)


@contextmanager
def _explained(given: Sequence[str], of_arm: str = "") -> Iterator[None]:
    """Errors of the checks as StudyError, which names the option instead of the setting where there is one."""
    try:
        yield
    except SettingsError as error:
        if option := overrides.OPTIONS.get(error.name):
            raise StudyError(f"{option}: {error.value}: {error.remedy}{of_arm}") from None
        option = "--set: " if overrides.named(given, error.name) else ""
        raise StudyError(f"{option}{error}{of_arm}") from None
    except UnsupportedVersion as error:
        raise StudyError(str(error)) from None
    except OmegaConfBaseException as error:  # a value that refers to what isn't there
        reason = str(error).splitlines()[0]
        raise StudyError(f"--set: {error.full_key}: {reason}; set what is there{of_arm}") from None
    except PromptError as error:
        raise StudyError(str(error)) from None


# -- own data


def check_own_data(config: DictConfig, given: Sequence[str], steps: int) -> int:
    """The files of `--data`, as verl and as the evaluations read them. Returns how many held-out problems there are.

    Raises StudyError.
    """
    from quads_recipe import preflight_data

    with _explained(given):
        _check_epochs(config, preflight_data.check(config), steps)
        return _check_heldout(Path(config.data.val_files))


def _check_epochs(config: DictConfig, rows: int, steps: int) -> None:
    """verl ends when it has been through the data so many times, whatever the number of steps."""
    most, batch, epochs = config.data.train_max_samples, config.data.train_batch_size, config.trainer.total_epochs
    rows = min(rows, most) if most > 0 else rows
    if (possible := rows // batch * epochs) < steps:
        raise StudyError(
            f"--steps: {steps} are more than the {possible:g} that {rows} training problems give in batches of {batch} "
            f"(data.train_batch_size), {epochs:g} times over (trainer.total_epochs); lower it, or raise that"
        )


def _check_heldout(file: Path) -> int:
    """What evaluate_worker reads of every row, whatever verl reads."""
    import pandas

    if file.suffix != ".parquet":
        raise StudyError(f"--data: {file}: held-out problems are read from a parquet; give one")
    read_prompts(file)  # says what is wrong with a file that can't be read
    rows = pandas.read_parquet(file)
    for column in ("data_source", "reward_model"):
        if column not in rows:
            raise StudyError(f"--data: {file}: has no column {column}, which evaluations need; add it")
    for number, value in enumerate(rows.reward_model, 1):
        if not isinstance(value, dict) or "ground_truth" not in value:
            raise StudyError(
                f"--data: {file}: row {number} of column reward_model has no ground_truth; add it, or leave the row out"
            )
    return len(rows)


# -- generated data, of an earlier start


def check_generated(config: DictConfig, folder: Path, seeds: Sequence[int]) -> None:
    """The files that are there already. Raises StudyError for one that can't be used."""
    from quads_recipe import preflight_data

    train = [file for seed in seeds if (file := data.train_file(folder, seed)).is_file()]
    heldout = [file for file in (folder / data.HELDOUT,) if file.is_file()]
    for name, files in ((preflight_data.TRAIN, train), (preflight_data.HELDOUT, heldout)):
        for file in files:
            changed = copy.deepcopy(config)
            with open_dict(changed):
                OmegaConf.update(changed, name, str(file))
            try:
                preflight_data.check_files(changed, name)
            except SettingsError as error:
                raise StudyError(f"{file}: {error.remedy}; or remove it, and it is generated again") from None


# -- prompts


def check_prompts(
    config: DictConfig, policy: Path, given: Sequence[str], own: tuple[Path, Path] | None, terms: tuple[int, int] | None
) -> str | None:
    """Prompts as the policy's tokenizer makes them: some of the training problems, as verl takes them, and whether
    there are held-out ones that an evaluation would not leave out. Returns a warning where the policy can't read many.

    own: files of `--data`; without them problems are generated with `terms`.

    Raises:
        StudyError.
    """
    from transformers import AutoTokenizer

    from quads_recipe.training_prompts import LOOKED_AT, spread

    trust = bool(config.actor_rollout_ref.model.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=trust)
    longest = config.data.max_prompt_length
    with _explained(given):
        train = read_prompts(own[0]) if own else data.sample("train", LOOKED_AT, terms)
        heldout = read_prompts(own[1]) if own else data.sample("heldout", LOOKED_AT, terms)
        _check_training(config, train, tokenizer, trust)
        if not any(fitting(tokenize([prompt], tokenizer), longest) for prompt in heldout):
            raise StudyError(
                f"data.max_prompt_length = {longest}: every held-out problem is longer, and evaluations would have "
                "none; raise it (--set)"
            )
        prompts = spread(train, LOOKED_AT) + spread(heldout, LOOKED_AT)
        return unknown_warning(tokenize(prompts, tokenizer), tokenizer, "--data" if own else "--policy")


def _check_training(config: DictConfig, prompts: Sequence[Prompt], tokenizer, trust: bool) -> None:
    """Raises StudyError, or PromptError for one that the chat template refuses."""
    from transformers import AutoConfig

    from quads_recipe import training_prompts

    if config.data.custom_cls.path:  # the user's own code makes prompts of the rows
        return
    chats = [chat for chat in training_prompts.spread(prompts, training_prompts.LOOKED_AT) if isinstance(chat, list)]
    tokenize(chats, tokenizer)
    options = OmegaConf.to_container(
        OmegaConf.create(config.data.get("apply_chat_template_kwargs") or {}), resolve=True
    )
    rows = [{"raw_prompt": chat} for chat in chats]
    tokens = training_prompts.tokenized(rows, len(rows), tokenizer, options)
    longest = config.data.max_prompt_length
    if config.data.filter_overlong_prompts:  # verl takes the rest; if there is none, `check` says what to raise
        tokens = fitting(tokens, longest) or tokens
    vocabulary = (
        AutoConfig.from_pretrained(config.actor_rollout_ref.model.path, trust_remote_code=trust)
        .get_text_config()
        .vocab_size
    )
    try:
        training_prompts.check(tokens, longest, config.data.truncation, vocabulary)
    except training_prompts.PromptError as error:
        raise StudyError(str(error)) from None
