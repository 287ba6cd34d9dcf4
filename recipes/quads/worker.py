"""verl's hybrid worker with a weight sync that is bounded in time and ends with a receipt."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker

from quads_ops import receipt
from quads_recipe import sensitivity
from quads_recipe.analysis.layers import SiteErrors
from quads_recipe.probe import LEG_FIELD, ProbeForwards
from quads_recipe.weight_sync import QuadsServerAdapter


class QuadsWorker(ActorRolloutRefWorker):
    """ActorRolloutRefWorker whose rollout is a QuadsServerAdapter and whose `update_weights` returns metrics."""

    _probe: ProbeForwards | None = None
    _sensitivity: sensitivity.Sensitivity | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        if "actor" in self.role:
            _require_our_engine(self.config.actor.strategy)
        super().init_model()
        if self.rollout is not None:
            stock = self.rollout
            self.rollout = QuadsServerAdapter(
                config=stock.config,
                model_config=stock.model_config,
                device_mesh=stock.device_mesh,
                sync_timeout_s=self.config.actor.fsdp_config.quads.get("sync_timeout_s", 50.0),
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def fetch_masks(self) -> None:
        """Get the residual masks in force from the first rollout replica, on every rank, for `compute_leg_log_prob`.

        Each replica chooses masks from the tokens that it generated, so with several replicas those of the others may
        differ a little.
        """
        masks = [None]
        if self.rank == 0:
            masks = [await self.rollout._execute_method("quads_masks")]
        torch.distributed.broadcast_object_list(masks, src=0)
        self._probe_forwards().set_masks(masks[0])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_leg_log_prob(self, data: TensorDict) -> TensorDict | None:
        """`compute_log_prob`, as the leg that the batch names (see quads_recipe.probe and quads_recipe.sensitivity)."""
        with self._leg(tu.pop(data, key=LEG_FIELD)):
            output = self.actor.infer_batch(data)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_layers(self) -> dict[str, SiteErrors]:
        """What the leg `layers` of the probe measured on this rank."""
        return self._probe_forwards().take_layers()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_sensitivities(self) -> dict[str, float]:
        """Take the gradients of the leg `gradients` into what the next weight sync sends; metrics of this rank."""
        return self._sensitivity.update()

    def _leg(self, name: str) -> AbstractContextManager:
        if name == "actor":
            return nullcontext()
        if name != sensitivity.LEG:
            return self._probe_forwards().leg(name)
        if self._sensitivity is None:
            self._sensitivity = sensitivity.Sensitivity(self.actor.engine)
        return self._sensitivity.measuring()

    def _probe_forwards(self) -> ProbeForwards:
        if self._probe is None:
            self._probe = ProbeForwards(self.actor.engine)
        return self._probe

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """Sync the weights, compare both sides' digests, and return this rank's `quads/` metrics.

        Raises:
            quads_ops.receipt.ReceiptMismatch: the two sides hold different codes or scales; names the matrices.
        """
        start = time.monotonic()
        await super().update_weights(global_steps=global_steps, mode=mode)
        metrics = {"quads/sync_seconds_max": time.monotonic() - start}
        if self.rollout.last_result is not None:  # this rank leads a rollout replica
            metrics |= self._compare(self.rollout.last_result)
        return metrics

    def _compare(self, results: list[dict]) -> dict[str, float]:
        """Receipts are combined over tensor parallel ranks by the rollout, so that of worker 0 is complete."""
        rollout = results[0]
        receipt.compare(self.actor.engine.last_receipt or {}, rollout["receipt"])
        metrics = {
            "quads/receipts_equal_min": 1.0,
            "quads/receipts_matrices_min": float(len(rollout["receipt"])),
            "quads/receipt_checksum_max": float(receipt.checksum(rollout["receipt"])),
            "quads/requantize_seconds_max": rollout["seconds"],
        }
        if rollout.get("changed_codes") is not None:
            metrics["quads/changed_codes_mean"] = rollout["changed_codes"]
        for name, value in (rollout.get("rac") or {}).items():
            if value is not None:
                suffix = "" if name.endswith(("_min", "_max")) else "_mean"
                metrics[f"quads/rac_{name}{suffix}"] = float(value)
        return metrics


def _require_our_engine(strategy: str) -> None:
    """verl chooses an engine by device and vendor; with its own nothing would be fake-quantized.

    Raises:
        RuntimeError: it would take another one.
    """
    from quads_recipe.engine import QuadsFSDPEngine  # registers it, as model.external_lib will

    chosen = EngineRegistry.get_engine_cls("language_model", strategy)
    if not issubclass(chosen, QuadsFSDPEngine):
        raise RuntimeError(
            f"verl takes {chosen.__name__} here (device {get_device_name()}, vendor {get_vendor()}), not the engine of "
            "QUADS, which is for NVIDIA GPUs and CPUs; if VERL_ENGINE_DEVICE or VERL_ENGINE_VENDOR is set, unset it"
        )
