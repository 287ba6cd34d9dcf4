"""Checks of the tokenizer: verl turns every prompt, which is a chat, into tokens with its template."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe import preflight_json
from quads_recipe.preflight_values import MODEL, local_path, select

_FAST, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_PATTERNS = (_FAST, "tekken.json", "*.tiktoken", "*.model", "*.spm")
_VOCABULARIES = (*_PATTERNS, "vocab*", "merges*", "*.vocab")


def check(config: DictConfig) -> None:
    """Loads the tokenizer as verl will.

    Raises:
        SettingsError: there is none, or it has no chat template.
    """
    name = MODEL + ("tokenizer_path" if select(config, MODEL + "tokenizer_path") else "path")
    path = str(local_path(name, select(config, name)))
    trust = bool(select(config, MODEL + "trust_remote_code"))
    tokenizer = load(name, path, f"save the model's tokenizer there, or set {MODEL}tokenizer_path", trust=trust)
    if select(config, MODEL + "custom_chat_template") or tokenizer.chat_template or _processor_has_one(path, trust):
        return
    raise SettingsError(
        name,
        path,
        "its tokenizer has no chat template, which verl needs for every prompt; use an instruction-tuned checkpoint, "
        f"or set {MODEL}custom_chat_template",
    )


def load(setting: str, path: str, remedy: str, *, trust: bool = False) -> Any:
    """The tokenizer (transformers.PreTrainedTokenizerBase).

    Args:
        setting: what holds `path`, for messages.
        path: a checkpoint's folder, or an id of the hub.
        remedy: for a folder without one.
        trust: run the checkpoint's own code.

    Raises:
        SettingsError: no tokenizer, or a file of it that can't be used: names file, field and value where that can
            be told.
    """
    folder = Path(path)
    preflight_json.check(setting, folder, preflight_json.TOKENIZER)
    if (folder / _TEMPLATE).is_file():
        preflight_json.read_text(setting, folder, _TEMPLATE)
    nothing = f"has no tokenizer: no file with its vocabulary; {remedy}"
    try:
        tokenizer = _load(path, trust)
    except Exception as error:  # whatever its files or its own code can raise
        if folder.is_dir() and not _any_file(folder, _VOCABULARIES):
            raise SettingsError(setting, path, nothing) from None
        where = _culprit(folder) if folder.is_dir() and not trust else None
        reason = f"{where}; correct it, or copy the file again" if where else remedy
        problem = f"has no tokenizer that can be loaded; {reason}: {preflight_json.one_line(error)}"
        raise SettingsError(setting, path, problem) from None
    if not _has_vocabulary(folder, tokenizer):
        raise SettingsError(setting, path, nothing)
    return tokenizer


def _load(path: str | Path, trust: bool = False) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    tokenizer("")  # which looks at some settings for the first time
    return tokenizer


def _culprit(folder: Path) -> str | None:
    """The file and the field that a tokenizer can't be made of, or None."""
    if (folder / _FAST).is_file():
        try:
            _load_fast(folder)
        except Exception as error:  # of a kind of its own
            return preflight_json.culprit(folder, _FAST, _load_fast) or f"{_FAST}: {error}"
        # Which that library does without, and transformers does not.
        added = preflight_json.read("", folder, _FAST).get("added_tokens")
        if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
            return f"{_FAST}: added_tokens = {preflight_json.shown(added)}, which must be a list of objects"
    there = (name for name in preflight_json.TOKENIZER[1:] if (folder / name).is_file())
    fields = (preflight_json.culprit(folder, name, _load) for name in there)
    return next(filter(None, fields), None)


def _load_fast(folder: Path) -> None:
    from tokenizers import Tokenizer

    Tokenizer.from_file(str(folder / _FAST))


def _has_vocabulary(folder: Path, tokenizer) -> bool:
    """transformers 5 makes an empty tokenizer of the model's class where there are no files."""
    bytewise = not tokenizer.vocab_files_names  # a class that needs no file
    return bytewise or not folder.is_dir() or _any_file(folder, {*tokenizer.vocab_files_names.values(), *_PATTERNS})


def _any_file(folder: Path, patterns: Iterable[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _processor_has_one(path: str, trust: bool) -> bool:
    """A processor of images may bring the template."""
    from verl.utils import hf_processor

    return bool(getattr(hf_processor(path, trust_remote_code=trust), "chat_template", None))
