"""One id per run, shared by all its processes, so that two runs on one host never meet in a socket or folder."""

from __future__ import annotations

import os
import tempfile
import uuid

ENV = "QUADS_RUN_ID"


def new_run_id() -> str:
    """Short (socket paths are limited to about 100 characters) and unique on a host."""
    return uuid.uuid4().hex[:10]


def weight_socket(replica_rank: int, local_rank: int) -> str:
    """ZMQ address on which one trainer rank sends weights to the rollout worker beside it.

    verl builds its own from the Ray job id, which is the same in every fresh Ray cluster.

    Raises:
        RuntimeError: QUADS_RUN_ID is not set in this process.
    """
    run_id = os.environ.get(ENV)
    if not run_id:
        raise RuntimeError(f"{ENV} is not set: start the run with a quads config, whose hydra callback sets it")
    return f"ipc://{tempfile.gettempdir()}/quads-{run_id}-{replica_rank}-{local_rank}.sock"
