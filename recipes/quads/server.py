"""verl's vLLM server, made to return the result of a collective RPC (verl 0.9.1 drops it)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class QuadsHttpServer(vLLMHttpServer):
    """vLLMHttpServer whose `collective_rpc` returns one result per vLLM worker."""

    async def collective_rpc(
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ):
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)


class QuadsReplica(vLLMReplica):
    """vLLMReplica that launches QuadsHttpServer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(QuadsHttpServer)
