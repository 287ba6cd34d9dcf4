"""The sending side of a weight sync, for tests that run a rollout engine."""

from __future__ import annotations

import asyncio
import threading

from quads_recipe.run_id import weight_socket

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
