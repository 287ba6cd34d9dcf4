"""The sending side of a weight sync, for tests that run a rollout engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import support_vllm

from quads_recipe.run_id import ENV, new_run_id, weight_socket

EXTENSION = "quads_recipe.rollout_extension.QuadsWorkerExtension"


class Trainer:
    """One verl sender for each rollout worker."""

    def __init__(self, llm, workers: int):
        self.llm, self.workers = llm, workers
        self.stuck = False

    def sync(self, items) -> list[dict]:
        """Send, and return what the workers returned; raises what the engine raises. `stuck`: a sender still waits."""
        threads = [threading.Thread(target=self._send, args=(rank, items), daemon=True) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        try:
            return self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        finally:
            for thread in threads:
                thread.join(20)
            self.stuck = any(thread.is_alive() for thread in threads)

    def _send(self, rank: int, items) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        sender = BucketedWeightSender(weight_socket(0, rank), bucket_size_mb=1, use_shm=True)
        sender.bucket_size = 48 << 10  # small, so that bucket boundaries fall inside layers
        asyncio.run(sender.async_send_weights(iter(items)))


@contextmanager
def running_engine(folder: Path, options: dict) -> Iterator[tuple]:
    """(engine in this process, HF model, trainer): Qwen3-MoE, as verl starts it, with dummy weights."""
    from verl.workers.rollout.vllm_rollout import utils

    model = support_vllm.make_model(folder, "qwen3_moe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, new_run_id())
        patch.setattr(utils, "set_death_signal", lambda: None)  # meant for a worker's own process
        with support_vllm.engine(folder, options, worker_extension_cls=EXTENSION, load_format="dummy") as llm:
            yield llm, model, Trainer(llm, 1)
