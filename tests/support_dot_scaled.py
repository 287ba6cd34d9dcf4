"""Makes `tl.dot_scaled` right in Triton's interpreter, for tests of the native form. Nothing else uses it.

Triton 3.8 and 3.9 decode an E4M3 block scale as if it were an E8M0 one: silently wrong. 3.6 and 3.7 have no dot_scaled
in the interpreter, so there the native form can be compiled only. `needs_repair` tells when the repair has become
unnecessary; test_kernel_gemm.py fails then.
"""

import numpy as np
import pytest
import support_interpreter
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

NAME = "_dot_scaled_scale_to_f32"


def repair(monkeypatch) -> None:
    """Decode E4M3 scales as E4M3; skip where the interpreter has no dot_scaled. On a GPU there is nothing to repair."""
    if not support_interpreter.INTERPRETED:
        capability = torch.cuda.get_device_capability()
        if capability[0] < 10:
            pytest.skip(f"native needs Blackwell; this GPU has compute capability {capability}")
        return
    original = getattr(interpreter, NAME, None)
    if original is None:
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no dot_scaled; native is compiled only")

    def decode(handle, compute_type):
        if handle.dtype == tl.float8e4nv:
            return _e4m3(handle.data.view(np.uint8))
        return original(handle, compute_type)

    monkeypatch.setattr(interpreter, NAME, decode)


def _e4m3(byte: np.ndarray) -> np.ndarray:
    return torch.from_numpy(byte).view(torch.float8_e4m3fn).float().numpy()
