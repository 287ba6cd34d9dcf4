"""The probe's second part, on request: the error of every quantized product on the step's own rollouts.

One more forward of the sequences looked at, with the rollout's weights and unquantized activations, in which every
product is computed again as the rollout rounds it (`quads_recipe.analysis.layers`). Its logprobs are thrown away.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from quads_ops.settings import RolloutSettings
from quads_recipe.analysis import masks
from quads_recipe.analysis.emulation import Emulation
from quads_recipe.analysis.layers import LayerErrors, SiteErrors, by_kind
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.masks import Residuals

FILE = "quads_layers.csv"
COLUMNS = (
    "step", "site", "kind", "layer", "tokens", "weight_error", "fp8_error",
    "ratio", "act_error_without_rac", "act_error", "energy_covered", "energy_removed",
)  # fmt: skip


@contextmanager
def measuring(
    engine, emulation: Emulation, weights: str, rollout: RolloutSettings, residuals: Residuals | None
) -> Iterator[LayerErrors]:
    """Forwards of the engine within it fill the errors that it gives.

    Args:
        engine: the QuadsFSDPEngine, in mode `unquantized`.
        weights: how the rollout rounds weights (`Leg.weights`).
        residuals: the rollout's, on the model's device; None without compensation.
    """
    series = {}
    if rollout.mode == "w4a4":
        series[0.0] = masks.uniform(emulation.sites, None)
        if rollout.residual.ratio > 0:
            series[rollout.residual.ratio] = residuals
    errors = LayerErrors(series, fp8=rollout.mode == "fp8")
    with emulation.running(Leg(weights), observer=errors), telling_padding(engine, errors):
        yield errors


@contextmanager
def telling_padding(engine, observer) -> Iterator[None]:
    """Sets `observer.valid` before each forward: which tokens are no padding. Only the engine's inputs know it."""
    prepare = engine.prepare_model_inputs

    def prepared(*args, **kwargs):
        inputs, about = prepare(*args, **kwargs)
        rank, size = _sequence_parallel()
        observer.valid = valid_tokens(inputs, about.get("pad_size", 0), rank, size)
        return inputs, about

    engine.prepare_model_inputs = prepared  # of this object, for the time of the measurement
    try:
        yield
    finally:
        del engine.prepare_model_inputs


def _sequence_parallel() -> tuple[int, int]:
    from verl.utils import ulysses

    return ulysses.get_ulysses_sequence_parallel_rank(), ulysses.get_ulysses_sequence_parallel_world_size()


def valid_tokens(inputs: Mapping[str, torch.Tensor | None], pad_size: int, rank: int, size: int) -> torch.Tensor:
    """bool [tokens of this rank's forward], from what verl's engine gives the model.

    Either a padded batch with its attention mask, or one packed row whose last `pad_size` tokens, counted over all
    `size` sequence parallel ranks, are padding.
    """
    if inputs["attention_mask"] is not None:
        return inputs["attention_mask"].flatten().bool()
    ids = inputs["input_ids"]
    place = torch.arange(ids.numel(), device=ids.device) + rank * ids.numel()
    return place < ids.numel() * size - pad_size


def metrics(sites: Mapping[str, SiteErrors], rollout: RolloutSettings) -> dict[str, float]:
    """`quads/layers_KIND_*`: relative errors of all products of a kind of layer together, shares of energy."""
    found = {}
    for kind, errors in by_kind(sites).items():
        values = _values(errors, rollout)
        name = re.sub(r"\W+", "_", kind)
        for column in ("weight_error", "fp8_error", "act_error_without_rac", "act_error", "energy_covered"):
            if values.get(column) is not None:
                found[f"quads/layers_{name}_{column}_mean"] = values[column]
    return found


def append(folder: Path, step: int, sites: Mapping[str, SiteErrors], rollout: RolloutSettings) -> Path:
    """Adds a row per site to quads_layers.csv in `folder`, in the order of the model. Returns the file."""
    file = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as out:
        table = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
        if not out.tell():
            table.writeheader()
        for name, errors in sites.items():
            site = {"step": step, "site": name, "kind": errors.site.kind, "layer": errors.site.layer}
            rounded = {key: f"{value:.6g}" for key, value in _values(errors, rollout).items()}
            table.writerow(site | {"tokens": errors.rows} | rounded)
    return file


def _values(errors: SiteErrors, rollout: RolloutSettings) -> dict[str, float]:
    values = {"weight_error": errors.weight_error}
    if rollout.mode == "fp8":
        values["fp8_error"] = errors.fp8_error
    if rollout.mode == "w4a4":
        ratio = rollout.residual.ratio
        values["ratio"] = ratio
        values["act_error_without_rac"] = errors.activation_error(0.0)
        values["act_error"] = errors.activation_error(ratio)
        values["energy_covered"], values["energy_removed"] = errors.energy_covered(ratio), errors.energy_removed(ratio)
    return values
