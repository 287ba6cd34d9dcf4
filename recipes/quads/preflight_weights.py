"""Checks of the checkpoint's weights, mostly by the headers of its files: all there, in the shapes that the model has.

transformers fills what a checkpoint lacks with random numbers and goes on. So its own loader, which knows every
spelling that it can read, runs here once with tensors that have shapes and no data. Values are read of two tensors,
where a head that is tied to the embedding is stored too; of all, where that is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads_ops.listing import first_names
from quads_ops.settings import SettingsError
from quads_recipe.stored_tensors import equal, not_finite, stored_tensors

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBER = re.compile(r"\.\d+(?=\.)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_depth(setting: str, path: Path, config: Any) -> None:
    """Before a model is built: one of a million layers would take the memory of this machine.

    Args:
        setting: what holds `path`, for messages.
        path: the checkpoint's folder. What holds no weights that can be read is left to `check`.
        config: a transformers.PreTrainedConfig.

    Raises:
        SettingsError: more layers than there are tensors.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    try:
        files = _files(path, getattr(config, "transformers_weights", None))
        tensors = None if files is None else sum(len(_read(file)) for file in files)
    except _Unfit:
        return
    if tensors is not None and isinstance(layers, int) and layers > tensors:
        raise SettingsError(
            setting,
            str(path),
            f"config.json: num_hidden_layers = {layers}, but the weights are {tensors} tensors; give weights and "
            "config.json that belong together",
        )


def check(
    setting: str,
    path: Path,
    model: nn.Module,
    *,
    fewer_layers: bool = False,
    finite_in: torch.dtype | None = None,
) -> list[str]:
    """Compare the checkpoint with a model on the meta device, whose parameters are replaced; lines for the terminal.

    Args:
        setting: what holds `path`, for messages.
        path: the checkpoint's folder; anything else is not checked.
        model: from the config.json that the weights are loaded with.
        fewer_layers: the model leaves layers of the checkpoint out on purpose.
        finite_in: read all values that the model loads, which takes as long as the disk needs, and refuse what is NaN
            or infinite in this dtype.

    Raises:
        SettingsError: a file that is missing or can't be read; a weight that is missing, of another shape, or of a
            part that the model does not have; a tied head with values of its own; values that are not finite.
    """
    try:
        files = _files(path, getattr(model.config, "transformers_weights", None))
        if files is None:
            return [f"the weights of {path} were not checked: no safetensors files in a local folder"]
        stored = {name: tensor for file in files for name, tensor in _read(file)}
        tied = dict(model.all_tied_weights_keys or {})
        found, not_loaded = _load(model, stored)
        _check_number_of_layers(model, stored, found, fewer_layers)
        _check_missing(model, found)
        _check_shapes(found)
        _check_unexpected(model, found.unexpected_keys, fewer_layers)
        _check_values(model, files, tied, not_loaded, finite_in)
    except _Unfit as problem:
        raise SettingsError(setting, str(path), str(problem)) from None
    ignored = sorted(found.unexpected_keys)
    return [f"not part of the model, and ignored in the checkpoint: {first_names(ignored, 3)}"] if ignored else []


class _Unfit(Exception):
    """Says what is wrong with the checkpoint, and the remedy."""


def _files(path: Path, explicit: str | None) -> list[Path] | None:
    """The safetensors files that transformers would read, or None if it reads others."""
    if not path.is_dir():
        return None
    single = path / (explicit or _FILE)
    index = single if single.name.endswith(".index.json") else path / _INDEX
    if single != index and single.is_file():
        return [single]
    if not index.is_file():
        if any(path.glob("pytorch_model*.bin*")) or any(path.glob("adapter_model.*")):
            return None
        raise _Unfit(f"holds no weights: neither {_FILE} nor {_INDEX}; copy them there")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(index, error) from None
    return [path / name for name in names]


def _read(file: Path) -> list[tuple[str, torch.Tensor]]:
    """Names, and tensors on the meta device."""
    from safetensors import SafetensorError, safe_open
    from transformers.modeling_utils import str_to_torch_dtype

    if not file.is_file():
        raise _Unfit(f"{file.name} is missing, which {_INDEX} names; copy it there")
    try:
        # Of numpy: as torch's it wants memory for the whole file, which may be larger than that of this machine.
        with safe_open(file, framework="numpy") as stored:
            parts = [(name, stored.get_slice(name)) for name in stored.keys()]  # noqa: SIM118 - is no mapping
            return [
                (name, torch.empty(part.get_shape(), dtype=str_to_torch_dtype[part.get_dtype()], device="meta"))
                for name, part in parts
            ]
    except KeyError as error:
        raise _Unfit(f"{file.name} holds weights of dtype {error}, which transformers can't load") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> _Unfit:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return _Unfit(f"{file.name} can't be read, copy it again: {reason}")


def _load(model: nn.Module, stored: Mapping[str, torch.Tensor]):
    """What transformers' loader reports (`transformers.utils.loading_report.LoadStateDictInfo`), and all that it leaves
    alone: the report has nothing of what the model's class knows to be of no use, such as old buffers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    load = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=model.dtype, weight_mapping=get_model_conversion_mapping(model)
    )
    with _no_progress_bar():
        found, _ = convert_and_load_state_dict_in_model(model, dict(stored), load, tp_plan=None)
    not_loaded = set(found.unexpected_keys)
    model.mark_tied_weights_as_initialized(found)
    # Of two tied weights that are both stored transformers compares the values, which are not here.
    pairs = (model.all_tied_weights_keys or {}).items()
    found.missing_keys.update(target for target, source in pairs if not {target, source} & found.missing_keys)
    model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(found)
    return found, not_loaded


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_number_of_layers(model: nn.Module, stored: Mapping[str, torch.Tensor], found, fewer_layers: bool) -> None:
    """Names the number where whole layers are missing or left over."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    numbers = {int(match[1]) for name in stored if (match := _LAYER.search(name))}
    if not isinstance(layers, int) or not numbers:
        return
    known = {_NUMBER.sub(".*", name) for name, _ in model.named_parameters()}
    missing = next((name for name in sorted(found.missing_keys) if _beyond(name, max(numbers))), None)
    # Layers for drafting come after the others too; they have other parts besides, and are left alone below.
    extra = [name for name in sorted(found.unexpected_keys) if _beyond(name, layers - 1)]
    left = next((name for name in extra if _NUMBER.sub(".*", name) in known), None)
    if missing or (left and not fewer_layers):
        verb = f"lack {missing}, which would start at random" if missing else f"hold {left}"
        raise _Unfit(
            f"config.json: num_hidden_layers = {layers}, but the weights have {max(numbers) + 1} layers: they {verb}; "
            "give weights and config.json that belong together"
        )


def _beyond(name: str, last: int) -> bool:
    match = _LAYER.search(name)
    return bool(match) and int(match[1]) > last


def _check_missing(model: nn.Module, found) -> None:
    """A buffer may be missing: the model computes it. What could not be put together has a better reason below."""
    gone = found.missing_keys - found.conversion_errors.keys()
    missing = [name for name, _ in model.named_parameters() if name in gone]
    if missing:
        raise _Unfit(f"lacks {first_names(missing, 3)}, which would start at random; give a complete checkpoint")


def _check_shapes(found) -> None:
    if found.mismatched_keys:
        name, there, here = min(found.mismatched_keys)
        raise _Unfit(
            f"holds {name} as {list(there)}, but config.json asks for {list(here)}; give weights and config.json that "
            "belong together"
        )
    if found.conversion_errors:
        name, text = min(found.conversion_errors.items())
        lines = text.splitlines()
        reason = next((line for line in reversed(lines) if re.match(r"\w+Error: ", line)), lines[-1])
        raise _Unfit(f"its parts of {name} don't fit together; one is missing or has another shape: {reason[:200]}")


def _check_unexpected(model: nn.Module, names: set[str], fewer_layers: bool) -> None:
    """Of what the model does not load, that which looks like a weight of it: another layer, a bias, a scale of codes.

    The rest (heads for other tasks, layers for drafting, old buffers) is no concern of the model.
    """
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    patterns = {_NUMBER.sub(".*", name) for name, _ in model.named_parameters()}
    for name in sorted(names):
        owner, _, last = name.rpartition(".")
        if owner in owners and last.startswith("weight_scale"):
            raise _Unfit(f"is quantized already ({name}); give the checkpoint in full precision")
        layer = _NUMBER.sub(".*", name) in patterns and not fewer_layers
        if layer or (owner in owners and last in ("weight", "bias")):
            raise _Unfit(
                f"holds {name}, for which the model of config.json has no place; give weights and config.json that "
                "belong together"
            )


def _check_values(
    model: nn.Module, files: list[Path], tied: Mapping[str, str], not_loaded: set[str], finite_in: torch.dtype | None
) -> None:
    if not tied and finite_in is None:
        return
    places = {name: place for file in files for name, place in stored_tensors(file).items()}
    try:
        for name, place in places.items() if finite_in else ():
            if name not in not_loaded and not_finite(place, finite_in):
                as_dtype = "" if finite_in == place.dtype else f" (in {str(finite_in).removeprefix('torch.')})"
                raise _Unfit(f"{place.file.name} holds NaN or infinity in {name}{as_dtype}; replace the checkpoint")
        prefix = f"{model.base_model_prefix}."
        for pair in tied.items():
            # Some checkpoints leave the prefix out, and transformers adds it.
            head, embedding = (
                next((n for n in (name, name.removeprefix(prefix)) if n in places), None) for name in pair
            )
            if head and embedding and not equal(places[head], places[embedding]):
                raise _Unfit(
                    f"{head} ({places[head].file.name}) and {embedding} ({places[embedding].file.name}) have "
                    "different values, but config.json ties them: the rollout would use one and the actor both; set "
                    "tie_word_embeddings to false, or leave the head out"
                )
    except OSError as error:
        raise _Unfit(f"its weights can't be read: {error}") from None
