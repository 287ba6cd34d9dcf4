"""The trainer's side of the weight sync: a bounded sender, and an adapter that returns what the rollout reports.

verl's own sender waits for every acknowledgement without a limit (verl/workers/rollout/vllm_rollout/
bucketed_weight_transfer.py), so a rollout worker that dies leaves the run hanging for ever.
"""

from __future__ import annotations

import time

import ray
import torch
import zmq
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from quads_recipe.run_id import weight_socket

_POLL_MS = 200
_LAST_ANSWER_MS = 5000
"""How long an answer may still be on its way when the call that sent it has returned."""


class WeightSyncError(RuntimeError):
    """The rollout did not take the weights; the message says what it was and the cause is chained."""


class _BoundedSocket:
    """A ZMQ socket whose waits end after `timeout_s`, or as soon as the receiving call is known to be over.

    Sending waits too: a REQ socket without a connected peer has nobody to queue for.
    """

    def __init__(self, socket: zmq.Socket, timeout_s: float, receiver: ray.ObjectRef | None):
        self._socket, self._timeout_s, self._receiver = socket, timeout_s, receiver

    def send_pyobj(self, message: object) -> None:
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def recv(self) -> bytes:
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._socket.poll(_POLL_MS, event):
            if self._receiver is not None and ray.wait([self._receiver], timeout=0)[0]:
                ray.get(self._receiver)  # raises the rollout's own error
                if self._socket.poll(_LAST_ANSWER_MS, event):  # it answered and ended since the last look
                    return
                raise WeightSyncError("the rollout finished its update before it had taken all weights")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"the rollout did not take a weight bucket within {self._timeout_s:g} s: "
                    "its worker is dead or stuck, see its log. If it is only slow, raise quads.sync_timeout_s"
                )


class BoundedWeightSender(BucketedWeightSender):
    """verl's sender with a limit on every wait.

    Args:
        timeout_s: longest wait for one acknowledgement, in seconds.
        receiver: Ray reference to the receiving call, if this rank made it.
    """

    def __init__(self, *args, timeout_s: float, receiver: ray.ObjectRef | None, **kwargs):
        super().__init__(*args, **kwargs)
        self._timeout_s, self._receiver = timeout_s, receiver

    def _init_socket(self):
        super()._init_socket()
        self.socket.setsockopt(zmq.LINGER, 0)  # or closing would wait for a receiver that is gone
        self.socket = _BoundedSocket(self.socket, self._timeout_s, self._receiver)


class QuadsServerAdapter(ServerAdapter):
    """verl's adapter to the vLLM server, with a bounded sync whose result is kept.

    `last_result` is what the rollout workers returned from the last sync, one dict per worker (see
    quads_recipe.rollout_extension), or None on ranks that have no server.
    """

    def __init__(self, *args, sync_timeout_s: float, **kwargs):
        super().__init__(*args, **kwargs)
        self._sync_timeout_s = sync_timeout_s
        self.last_result: list[dict] | None = None
        local_rank = int(self.zmq_handle.removesuffix(".sock").rsplit("-", 1)[-1])
        self.zmq_handle = weight_socket(self.replica_rank, local_rank)

    @torch.no_grad()
    async def update_weights(
        self, weights, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs
    ):
        """Send full tensors to the rollout and wait until it has requantized them.

        Raises:
            WeightSyncError: no acknowledgement in time, with the remedy.
            ray.exceptions.RayTaskError: the rollout's own error.
            ValueError: a wire format other than "named_tensors".
        """
        if wire_format != "named_tensors":
            raise ValueError(f"checkpoint_engine wire format = {wire_format!r}: quads sends named_tensors only")
        self.last_result = None
        receiver = await self._execute_method(
            "update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": self.use_shm}
        )
        sender = BoundedWeightSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            timeout_s=self._sync_timeout_s,
            receiver=receiver,
        )
        await sender.async_send_weights(weights)
        if receiver is not None:
            self.last_result = await receiver
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
