"""The rollout's side of the weight sync: a worker extension that takes verl's weight buckets and requantizes.

Selected by `rollout.engine_kwargs.vllm.worker_extension_cls`. It replaces `update_weights_from_ipc` of verl's own
extension (verl/workers/rollout/vllm_rollout/utils.py), which loads each bucket by itself and so can't reload a layer
that has its kernel format.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

import torch
from verl.utils.device import get_torch_device
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, rebuild_ipc
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from quads_ops.vllm_method.compat_vllm import tp_gather
from quads_ops.vllm_method.config import path
from quads_ops.vllm_method.diagnosis import QuadsDiagnosis
from quads_ops.vllm_method.reload import (
    Loaded,
    WeightUpdate,
    WeightUpdateError,
    combine_loaded,
    rac_summary,
    settle,
)
from quads_recipe.run_id import weight_socket

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]


class QuadsWorkerExtension(QuadsDiagnosis, vLLMColocateWorkerExtension):
    """vLLM worker mixin. `update_weights_from_ipc` keeps verl's signature and returns a report."""

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> dict[str, object]:
        """Receive all weights, quantize them, and choose new masks.

        Returns the same on every worker of a tensor parallel group:

        - `receipt`: matrix -> (digest of codes, digest of block scales, bits of global_scale_dec), of whole matrices
        - `changed_codes`: share of the NVFP4 codes that changed since the last sync; None if nothing was quantized or
          there were no real weights before. `changed_codes_by_matrix`: matrix -> (changed, all). Both are estimates
          where the engine slept since at level 2, which discards the codes
        - `rac`: ratio, energy_covered (share of the residual's energy that the masks of the period just ended covered),
          mask_moved (share of mask entries that changed) and from_prior, or None without activation quantization
        - `seconds`: of this call; `path`: the implementation that multiplies

        Raises:
            WeightUpdateError: on every worker, with the cause; the sender was served to the end.
        """
        start = time.monotonic()
        session = _Session(self, peft_config)
        receiver = _DrainingReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(session.take)
        session.note(receiver.error)
        report = session.finish()
        get_torch_device().empty_cache()  # the KV cache wakes up next, and gets nothing from torch's cache
        return report | {"seconds": time.monotonic() - start, "path": path()}

    def _get_zmq_handle(self) -> str:
        """The socket of this run; verl's own name is the same for every run on a host."""
        replica, rank = re.search(r"-replica-(\d+)-rank-(\d+)\.sock$", super()._get_zmq_handle()).groups()
        return weight_socket(int(replica), int(rank))


class _Session:
    """One sync on one worker. Errors are kept until the stream has ended, and then shared with the other workers."""

    def __init__(self, worker: QuadsWorkerExtension, peft_config: dict | None):
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._update = WeightUpdate(self._model, worker.vllm_config, worker.device)
        self._error: BaseException | None = None
        if peft_config:
            self.note(WeightUpdateError("LoRA weights (peft_config) can't be synced into a quantized rollout"))
        else:
            self._guard(self._update.begin)

    def note(self, error: BaseException | None) -> None:
        """Keep the first error."""
        if self._error is None and error is not None:
            logger.error("quads: weight update failed: %s", error, exc_info=error)
            self._error = _without_frames(error)

    def take(self, bucket: Bucket) -> None:
        if self._error is None:
            self._guard(self._update.load, bucket)

    def finish(self) -> dict[str, object]:
        loaded = self._guard(self._update.finish) if self._error is None else None
        text = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        outcomes = tp_gather((text, loaded))
        failed = [f"worker {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failed:
            reason = "; ".join(failed)
            self._update.abort(reason)
            raise WeightUpdateError(f"the rollout could not load the trainer's weights ({reason})") from self._error
        report = settle(self._model)
        whole = combine_loaded([loaded for _, loaded in outcomes])
        return {
            "receipt": {name: tuple(entry) for name, entry in whole.receipts.items()},
            "changed_codes": self._share(whole),
            "changed_codes_by_matrix": whole.changed,
            "rac": rac_summary(self._model, report),
        }

    def _share(self, whole: Loaded) -> float | None:
        """None at the first sync into dummy weights: there is nothing to compare with."""
        known = getattr(self._worker, "_quads_synced", False) or (
            self._worker.vllm_config.load_config.load_format != "dummy"
        )
        self._worker._quads_synced = True
        total = sum(total for _, total in whole.changed.values())
        return sum(changed for changed, _ in whole.changed.values()) / total if known and total else None

    def _guard(self, step: Callable, *args) -> Loaded | None:
        try:
            return step(*args)
        except Exception as error:  # any: the sender must be served, and the cause reported at the end
            self.note(error)
            return None


class _DrainingReceiver(BucketedWeightReceiver):
    """verl's receiver, which takes and acknowledges the whole stream whatever goes wrong with its contents.

    verl's own loop ends at the first error without an answer, and the sender waits for it. The protocol is that of verl
    0.9.1: one message about the buffer, then one per bucket, each answered by an empty one; the last is answered after
    the buffer is released.
    """

    error: BaseException | None = None

    def receive_weights(self, on_bucket: Callable[[Bucket], None]) -> None:
        """Call `on_bucket` for every bucket; its tensors are valid only during the call. `error` has the first error.

        It never raises: even if the connection breaks, the other workers must hear of it.
        """
        try:
            self._init_socket()
            self._attach()
            while not self._receive_bucket(on_bucket):
                self.socket.send(b"")
            self._ack_pending = True
        except Exception as error:
            self._note(error)
        self._release()

    def _release(self) -> None:
        """Close the buffer, and give the last answer even if that fails."""
        try:
            self._cleanup()
        except Exception as error:
            self._note(error)
            if self.socket is not None:
                if self._ack_pending:
                    self.socket.send(b"")
                self.socket.close()
                self.socket = None

    def _note(self, error: Exception) -> None:
        if self.error is None:
            self.error = _without_frames(error)

    def _attach(self) -> None:
        """As `_init_buffer`, but answers even if the buffer can't be attached."""
        try:
            self._init_buffer()
        except Exception as error:
            self._note(error)
            self.socket.send(b"")

    def _receive_bucket(self, on_bucket: Callable[[Bucket], None]) -> bool:
        """True for the last one."""
        message = self.socket.recv_pyobj()
        if self.error is None:
            try:
                on_bucket(self._tensors(message["bucket_meta"]))
            except Exception as error:
                self._note(error)
            get_torch_device().synchronize()  # the sender writes over the bucket once it has the answer
        return message["is_last"]

    def _tensors(self, bucket_meta: dict[str, dict]) -> Bucket:
        bucket = []
        for name, meta in bucket_meta.items():
            if meta["handle"] is not None:  # a tensor larger than the bucket, sent by itself
                bucket.append((name, rebuild_ipc(meta["handle"], self.device.index)))
                continue
            size = meta["dtype"].itemsize * meta["shape"].numel()
            part = self.buffer[meta["offset"] : meta["offset"] + size]
            bucket.append((name, part.view(dtype=meta["dtype"]).view(meta["shape"])))
        return bucket


def _without_frames(error: BaseException) -> BaseException:
    """Drop the tracebacks: their frames hold views of the bucket, whose shared memory could then not be closed."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
