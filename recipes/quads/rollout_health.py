"""Is the rollout still there? verl 0.9.1 goes on with what was generated before an engine died, or fails elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

_PATIENCE_S = 30


class RolloutDeadError(RuntimeError):
    """The rollout can't serve any more: one of its processes was killed, or crashed."""


def require_alive(servers: Sequence[ActorHandle]) -> None:
    """Ask each `quads_recipe.server.QuadsHttpServer` whether its engine lives.

    Raises:
        RolloutDeadError: one does not, or the server itself is gone or silent.
    """
    try:
        ray.get([server.check_alive.remote() for server in servers], timeout=_PATIENCE_S)
    except ray.exceptions.RayTaskError as error:
        raise RolloutDeadError(str(error.cause)) from error
    except ray.exceptions.RayActorError as error:
        raise RolloutDeadError(f"a rollout server was killed or crashed: {error}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise RolloutDeadError(f"a rollout server has not answered for {_PATIENCE_S} s") from error
