"""NVFP4 numerics, fake-quantized modules, residual compensation, and the vLLM quantization method.

The names below are loaded when first used, so that reading settings does not import torch.
"""

import importlib

_HOMES = {
    "QuadsSettings": "settings",
    "ResidualMask": "residual",
    "Targets": "targets",
    "compensate": "residual",
    "convert": "fake_quant",
    "dequantize_weight": "weights",
    "fake_quantize_weight": "weights",
    "global_scale_dec": "nvfp4",
    "qdq": "nvfp4",
    "quantize_weight": "weights",
    "select_mask": "residual",
    "weight_amax": "weights",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
