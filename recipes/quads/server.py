"""verl's vLLM server, which also returns what a collective RPC returned (verl 0.9.1 drops it) and tells of a death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.v1.engine.exceptions import EngineDeadError

from quads_recipe.rollout_health import RolloutDeadError


class QuadsHttpServer(vLLMHttpServer):
    """vLLMHttpServer whose `collective_rpc` returns one result per vLLM worker."""

    async def collective_rpc(
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ):
        with self._naming_a_death():
            return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    async def generate(self, *args, **kwargs):
        with self._naming_a_death():
            return await super().generate(*args, **kwargs)

    async def check_alive(self) -> None:
        """Raises RolloutDeadError if the engine has died."""
        with self._naming_a_death():
            await self.engine.check_health()

    @contextmanager
    def _naming_a_death(self) -> Iterator[None]:
        # vLLM's own message is "EngineCore encountered an issue. See stack trace (above) for the root cause".
        try:
            yield
        except EngineDeadError as error:
            raise RolloutDeadError(
                f"the vLLM engine of rollout replica {self.replica_rank} is dead: one of its processes was killed "
                "(by the system, if memory ran out) or crashed; vLLM's lines in the log (EngineCore, Worker) name it"
            ) from error


class QuadsReplica(vLLMReplica):
    """vLLMReplica that launches QuadsHttpServer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(QuadsHttpServer)
