"""The probe: where the mismatch of a step comes from, measured on some of its own rollouts.

Every `quads.probe.every` steps the trainer runs the legs of `quads_recipe.analysis.legs` on the first
`quads.probe.sequences` sequences: its own forward, one with the rollout's weights, one with the rollout's activations
too (same residual masks). They split d = logp_rollout - logp_actor into d_weight + d_act + d_num, token by token.

It costs three forwards of those sequences; with `quads.probe.layers` a fourth one measures every quantized product
(`quads_recipe.probe_layers`). It runs without gradients and touches no parameter, no optimizer state and no RNG, so
training is the same with and without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.utils.device import get_device_id
from verl.workers.utils.padding import response_from_nested

from quads_ops.settings import QuadsSettings
from quads_recipe import probe_layers
from quads_recipe.analysis.decompose import decompose, nonfinite, summarize
from quads_recipe.analysis.emulation import Emulation
from quads_recipe.analysis.layers import SiteErrors, merge
from quads_recipe.analysis.legs import path_of
from quads_recipe.analysis.masks import from_rollout, to_device
from quads_recipe.analysis.sites import experts_per_token

LEGS = ("actor", "weights", "activations")
LAYERS = "layers"
"""The forward that measures every quantized product; its logprobs do not count."""
LEG_FIELD = "quads_leg"
"""Name of the batch-level value that tells a worker which leg to run."""


class ProbeForwards:
    """The worker's side: verl's forward as one of the legs.

    Args:
        engine: the initialized QuadsFSDPEngine.
    """

    def __init__(self, engine):
        self._engine, self._path = engine, path_of(engine.settings)
        self._residuals = None
        self._emulation = None
        self._layers: dict[str, SiteErrors] = {}
        if engine.plan:
            experts = experts_per_token(engine.model_config.hf_config)
            self._emulation = Emulation(engine.module, engine.plan, experts)

    def set_masks(self, workers: list[list[dict]]) -> None:
        """workers: what the rollout's workers returned from `quads_masks`."""
        # Where the forwards run, which is not where offloaded parameters wait.
        self._residuals = to_device(from_rollout(workers), get_device_id())

    @contextmanager
    def leg(self, name: str) -> Iterator[None]:
        """Forwards of the engine within it are those of the leg `weights` or `activations`, or measure the layers."""
        if self._emulation is None:  # nothing is quantized on either side: every leg is the actor's forward
            yield
            return
        if name == LAYERS:
            rollout, weights = self._engine.settings.rollout, self._path.weights.weights
            with self._engine.unquantized():
                with probe_layers.measuring(self._engine, self._emulation, weights, rollout, self._residuals) as errors:
                    yield
            self._layers = errors.by_site
            return
        leg = getattr(self._path, name)
        with self._engine.unquantized(), self._emulation.running(leg, self._residuals if leg.compensated else None):
            yield

    def take_layers(self) -> dict[str, SiteErrors]:
        """What the last leg `layers` measured on this rank; forgets it."""
        layers, self._layers = self._layers, {}
        return layers


def run(worker_group, part: KVBatchMeta, settings: QuadsSettings) -> dict[str, float]:
    """Split the mismatch of `part` (see `part_of`), whose rollout logprobs are in the TransferQueue.

    Returns `quads/probe_*` metrics, in nats.
    """
    start = time.monotonic()
    if settings.rollout.residual.ratio > 0:
        worker_group.fetch_masks()
    legs = [_leg(worker_group, part, leg) for leg in LEGS]
    reported, sequence = _rollout_logprobs(part)
    parts = decompose(reported, *legs)
    summary = summarize(parts, sequence)
    metrics = {
        "quads/probe_seconds_max": time.monotonic() - start,
        "quads/probe_tokens_sum": float(reported.numel()),
        "quads/probe_nonfinite_sum": float(nonfinite(parts)),
        "quads/probe_sum_error_max": parts.error(),
    }
    for name, of in summary.items():
        metrics |= {
            f"quads/probe_{name}_abs_mean": of.mean,
            f"quads/probe_{name}_abs_p99": of.p99,
            f"quads/probe_{name}_abs_max": of.max,
        }
        if of.share is not None and name != "d":
            metrics[f"quads/probe_{name}_variance_share"] = of.share
    return metrics


def measures_layers(settings: QuadsSettings) -> bool:
    """Whether the layers are asked for, and the rollout quantizes any."""
    return settings.probe.layers and settings.rollout.mode != "bf16"


def run_layers(worker_group, part: KVBatchMeta, settings: QuadsSettings, step: int, folder: Path) -> dict[str, float]:
    """Measure every quantized product on `part`, with the masks that `run` fetched, into a table in `folder`.

    Returns `quads/layers_*` metrics.
    """
    start = time.monotonic()
    part.extra_info[LEG_FIELD] = LAYERS
    worker_group.compute_leg_log_prob(part)
    sites = merge(worker_group.take_layers())
    probe_layers.append(folder, step, sites, settings.rollout)
    seconds = {"quads/layers_seconds_max": time.monotonic() - start}
    return seconds | probe_layers.metrics(sites, settings.rollout)


def part_of(batch: KVBatchMeta, sequences: int, dp_size: int, rollout: DictConfig) -> KVBatchMeta | None:
    """The first sequences that are no padding: as many on every rank, in micro batches no larger than configured.

    sequences: how many to look at; at least one on every rank. dp_size: data parallel ranks of the actor. rollout:
    verl's `actor_rollout_ref.rollout`. None if the batch has fewer sequences than `dp_size`.
    """
    rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    per_rank = min(len(rows), max(sequences, dp_size)) // dp_size
    if not per_rank:
        return None
    extra = {"calculate_entropy": False, "compute_loss": False, "temperature": rollout.temperature}
    if not rollout.log_prob_use_dynamic_bsz:
        extra["micro_batch_size_per_gpu"] = micro = min(per_rank, rollout.log_prob_micro_batch_size_per_gpu)
        per_rank -= per_rank % micro
    part = batch.select_keys(rows[: per_rank * dp_size])
    part.extra_info.update(extra)
    return part


def _leg(worker_group, part: KVBatchMeta, leg: str) -> torch.Tensor:
    """Logprobs of the response tokens, FP32 [tokens], sequence after sequence."""
    part.extra_info[LEG_FIELD] = leg
    worker_group.compute_leg_log_prob(part)
    data = tq.kv_batch_get(keys=part.keys, partition_id=part.partition_id, select_fields=["log_probs", "response_mask"])
    logprobs = response_from_nested(data["log_probs"], data["response_mask"])
    return logprobs.values().float()[data["response_mask"].values().bool()]


def _rollout_logprobs(part: KVBatchMeta) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP32 [tokens], int64 [tokens]: the sequence of each)"""
    data = tq.kv_batch_get(
        keys=part.keys, partition_id=part.partition_id, select_fields=["rollout_log_probs", "response_mask"]
    )
    mask = data["response_mask"].values().bool()
    sequence = torch.repeat_interleave(data["response_mask"].offsets().diff())
    return data["rollout_log_probs"].values().float()[mask], sequence[mask]
