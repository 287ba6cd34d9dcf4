"""Prompts from a file: text lines, JSON lines, or a verl parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from quads_recipe.preflight_json import surrogates

Prompt = str | list[dict]
"""Text, or chat messages."""

FORMATS = (".txt", ".jsonl", ".parquet")
MOST_UNKNOWN = 0.1
"""Share of unknown tokens in prompts, above which `unknown_warning` speaks."""


class PromptError(ValueError):
    """A file without usable prompts: names the file, the place and the remedy."""


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, in its order.

    .txt: one a line. .jsonl: a string a line, or an object with `prompt` (text or chat messages) or `messages`.
    .parquet: column `prompt`, as verl reads it (chat messages, or text).

    Raises:
        PromptError: no such file, another format, a line or column that can't be read, or no prompts.
    """
    if not path.is_file():
        raise PromptError(f"--data {path}: no such file; give a .txt, .jsonl or .parquet file with prompts")
    readers = {".txt": _text, ".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise PromptError(f"--data {path}: its name must end in {', '.join(FORMATS)}, which says how to read it")
    prompts = list(readers[path.suffix](path))
    if not prompts:
        raise PromptError(f"--data {path}: holds no prompts")
    return prompts


def tokenize(prompts: Iterable[Prompt], tokenizer, raw: bool = False) -> list[list[int]]:
    """Token ids. Text becomes a user message where the tokenizer has a chat template, unless `raw`.

    Prompts are counted from 1 in messages, as lines and rows of files are.

    Raises:
        PromptError: chat messages for a tokenizer without a template, or that the template refuses.
    """
    return [_ids(prompt, i, tokenizer, raw) for i, prompt in enumerate(prompts, 1)]


def fitting(prompts: Iterable[list[int]], longest: int) -> list[list[int]]:
    """The prompts of 1 to `longest` tokens."""
    return [prompt for prompt in prompts if 0 < len(prompt) <= longest]


def unknown_share(prompts: Iterable[Sequence[int]], tokenizer) -> float:
    """Share of the tokens that stand for text which the tokenizer does not know.

    0 where it has no unknown token of its own. Some that know every byte give their end token as one, which then means
    no unknown text.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return 0.0
    tokens = [token for prompt in prompts for token in prompt]
    return tokens.count(unknown) / len(tokens) if tokens else 0.0


def unknown_warning(prompts: Iterable[Sequence[int]], tokenizer, setting: str = "--data") -> str | None:
    """One line where more than MOST_UNKNOWN of the prompts' tokens are unknown, else None.

    Args:
        prompts: token ids.
        tokenizer: the model's (transformers.PreTrainedTokenizerBase).
        setting: where the prompts come from.
    """
    share = unknown_share(prompts, tokenizer)
    if share <= MOST_UNKNOWN:
        return None
    return (
        f"{setting}: {share:.0%} of the prompts' tokens are {tokenizer.unk_token}, which stands for text that the "
        "tokenizer does not know, so the model can't read it. Give prompts in the model's vocabulary, or the tokenizer "
        "that belongs to the model."
    )


def _ids(prompt: Prompt, number: int, tokenizer, raw: bool) -> list[int]:
    if isinstance(prompt, str):
        if raw or not tokenizer.chat_template:
            return _encoded(prompt, number, tokenizer)
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise PromptError(
            f"--data: prompt {number} is a chat, but the model's tokenizer has no chat template; give plain text"
        )
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        reason = " ".join(str(error).split())
        raise PromptError(f"--data: the chat template refuses prompt {number}: {reason}") from None
    return _encoded(text, number, tokenizer, add_special_tokens=False)


def _encoded(text: str, number: int, tokenizer, **options) -> list[int]:
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except Exception as error:  # of the tokenizers library, which raises nothing more special
        raise PromptError(f"--data: the tokenizer refuses prompt {number}: {error}") from None


def _text(path: Path):
    try:
        # Not splitlines: a text may hold other characters that end a line, as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"--data {path}: is not UTF-8 text: {error}") from None
    return (line for line in lines if line.strip())


def _jsonl(path: Path):
    for number, line in enumerate(_text(path), 1):
        try:
            value = json.loads(line)
        except ValueError as error:  # a number of too many digits is no JSONDecodeError
            raise PromptError(f"--data {path}: prompt {number} is not JSON: {error}") from None
        except RecursionError:
            raise PromptError(f"--data {path}: prompt {number} is nested too deeply to be read") from None
        if isinstance(value, dict):
            value = value.get("messages") if value.get("prompt") is None else value["prompt"]
        yield _checked(value, f"{path}: prompt {number}")


def _parquet(path: Path):
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except Exception as error:  # pyarrow raises several kinds
        raise PromptError(f"--data {path}: can't be read as parquet: {error}") from None
    if "prompt" not in frame.columns:
        columns = ", ".join(map(str, frame.columns))
        raise PromptError(f"--data {path}: has no column `prompt`, which verl reads; it has {columns}")
    for number, value in enumerate(frame["prompt"], 1):
        # Chats come as arrays of numpy.
        yield _checked(
            list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value, f"{path}: row {number}"
        )


def _checked(value, where: str) -> Prompt:
    if any(True for _ in surrogates(value)):
        raise PromptError(f"--data {where}: holds text that is no Unicode (a lone surrogate); leave it out")
    if isinstance(value, str) and value.strip():
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        return [dict(message) for message in value]
    raise PromptError(
        f"--data {where}: needs a text, or chat messages [{{role, content}}, ...], alone or under `prompt`"
    )
