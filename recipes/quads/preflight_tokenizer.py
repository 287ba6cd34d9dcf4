"""Checks of the tokenizer: verl turns every prompt, which is a chat, into tokens with its template."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from quads_ops.settings import SettingsError
from quads_recipe.preflight_values import MODEL, select


def check(config: DictConfig) -> None:
    """Loads the tokenizer as verl will.

    Raises:
        SettingsError: there is none, or it has no chat template.
    """
    name = MODEL + ("tokenizer_path" if select(config, MODEL + "tokenizer_path") else "path")
    path = str(Path(str(select(config, name))).expanduser())
    trust = bool(select(config, MODEL + "trust_remote_code"))
    from transformers import AutoTokenizer

    remedy = f"save the model's tokenizer there, or set {MODEL}tokenizer_path"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except Exception as error:  # whatever its files or its own code can raise
        reason = " ".join(str(error).split())[:300]
        raise SettingsError(name, path, f"has no tokenizer that can be loaded; {remedy}: {reason}") from None
    if not _has_vocabulary(Path(path), tokenizer):
        raise SettingsError(name, path, f"has no tokenizer: no file with its vocabulary; {remedy}")
    if select(config, MODEL + "custom_chat_template") or tokenizer.chat_template or _processor_has_one(path, trust):
        return
    raise SettingsError(
        name,
        path,
        "its tokenizer has no chat template, which verl needs for every prompt; use an instruction-tuned checkpoint, "
        f"or set {MODEL}custom_chat_template",
    )


def _has_vocabulary(folder: Path, tokenizer) -> bool:
    """transformers 5 makes an empty tokenizer of the model's class where there are no files."""
    names = {*tokenizer.vocab_files_names.values(), "tokenizer.json", "tekken.json", "*.tiktoken", "*.model", "*.spm"}
    bytewise = not tokenizer.vocab_files_names  # a class that needs no file
    return bytewise or not folder.is_dir() or any(any(folder.glob(name)) for name in names)


def _processor_has_one(path: str, trust: bool) -> bool:
    """A processor of images may bring the template."""
    from verl.utils import hf_processor

    return bool(getattr(hf_processor(path, trust_remote_code=trust), "chat_template", None))
