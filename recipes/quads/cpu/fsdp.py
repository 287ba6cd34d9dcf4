"""Patches while FSDPEngine._build_fsdp_module of verl 0.9.1 (workers/engine/fsdp/transformer_impl.py) runs on a CPU.

- FSDP1: it passes sync_module_states=True, which torch 2.13 refuses for parameters on a CPU; gloo could broadcast them.
- The reference model: it forces CPU offload (FSDP2 with pinned memory), which needs an accelerator. On a CPU there is
  nothing to offload.
tests/test_engine_fsdp.py fails once upstream no longer needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp._init_utils as fsdp_init
import verl.workers.engine.fsdp.transformer_impl as transformer_impl


@contextmanager
def patched() -> Iterator[None]:
    """Replace the three functions, and put them back."""
    with ExitStack() as stack:
        for owner, name, value in (
            (fsdp_init, "_check_module_states_for_sync_module_states", lambda module_states: None),
            (transformer_impl, "CPUOffloadPolicy", lambda pin_memory=True: None),
            (torch_fsdp, "CPUOffload", lambda offload_params=True: None),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
