"""Tensors that a layer computes with, which keep their addresses over every reload (CUDA graphs hold on to them)."""

from __future__ import annotations

import torch


class KernelTensors:
    """Named tensors, created by the first `store` and written in place by the later ones.

    The layer gets them as parameters; vLLM takes them off the layer while it reloads and puts them back, so the
    objects are kept here.
    """

    KEPT_ASLEEP: tuple[str, ...] = ()
    """Those that a reload does not bring anew. The layer gets them as buffers: of an engine that sleeps at level 2, as
    verl's does, vLLM keeps buffers, and discards parameters."""

    def __init__(self):
        self._tensors: dict[str, torch.nn.Parameter] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].data

    def store(self, name: str, value: torch.Tensor) -> None:
        """Raises ValueError if shape or dtype differ from before."""
        live = self._tensors.get(name)
        if live is None:
            self._tensors[name] = torch.nn.Parameter(value.contiguous(), requires_grad=False)
        elif live.shape != value.shape or live.dtype != value.dtype:
            raise ValueError(
                f"reload of {name}: {value.dtype} {tuple(value.shape)} against {live.dtype} {tuple(live.shape)}"
            )
        else:
            live.data.copy_(value)

    def register(self, layer: torch.nn.Module, stem: str, source: str) -> None:
        """Make them parameters of `layer`, named `<stem>_<name>`; the first takes the name of the source weight.

        vLLM looks for that name: in a checkpoint's experts that belong to other workers, and to ask for the device.
        """
        for index, (name, tensor) in enumerate(self._tensors.items()):
            if name in self.KEPT_ASLEEP:
                layer.register_buffer(f"{stem}_{name}", tensor.data, persistent=False)
            else:
                layer.register_parameter(f"{stem}_{name}" if index else source, tensor)
