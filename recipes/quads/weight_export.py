"""What the trainer sends to the rollout, and the receipt of it.

Quantized matrices are sent in compute dtype, since that is what both sides quantize; everything else as verl sends it.
At no time is more than one parameter (and the members of its scale group) gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from quads_ops import dispatch, receipt
from quads_ops.matrix_plan import PlannedParameter
from quads_ops.nvfp4 import global_scale_dec
from quads_ops.vllm_method.names import table_for
from quads_ops.weights import weight_amax
from quads_recipe.weight_finite import FiniteCheck

# Elements quantized at a time: bounds the FP32 temporaries.
_CHUNK = 1 << 24


def stream(
    params: Mapping[str, torch.Tensor],
    plan: Mapping[str, PlannedParameter],
    receipts: ReceiptWriter | None,
    *,
    dtype: torch.dtype,
    model_type: str,
    device: torch.device | str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors under the names that vLLM loads, experts one by one. A collective: every rank must exhaust it.

    params: state dict of the FSDP model, in-memory names; values DTensor or plain tensors.
    plan: the quantized parameters. receipts: gets each of them. dtype: compute dtype.

    Raises:
        KeyError: a planned parameter is not in the state dict.
        quads_recipe.weight_finite.NonFiniteWeightsError: after the last tensor, if one of them is not finite.
    """
    missing = plan.keys() - params.keys()
    if missing:
        raise KeyError(f"quantized parameters that are not in the model's state dict: {', '.join(sorted(missing))}")
    names, finite = table_for(model_type), FiniteCheck()
    for name, param in params.items():
        tensor = param.to(device, non_blocking=True)
        if name in plan:
            tensor = tensor.to(dtype)  # before gathering: half the bytes, the same values
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        finite.add(name, tensor)
        if receipts is not None and name in plan:
            receipts.add(plan[name], tensor)
        for part_name, part in unfuse_moe_params([(name, tensor)], model_type):
            yield names.loader(part_name), part
    finite.require()


class ReceiptWriter:
    """Digests the matrices that pass by. Every rank sees all of them, so each digests its share of the groups.

    Args:
        plan: the quantized parameters, in the order of the stream.
        rank, ranks: this process and their number, in the default process group.
    """

    def __init__(self, plan: Mapping[str, PlannedParameter], rank: int, ranks: int):
        groups = dict.fromkeys(p.group for p in plan.values())
        self._mine = {group for index, group in enumerate(groups) if index % ranks == rank}
        self._ranks = ranks
        self._plan = plan
        self._waiting: dict[str, torch.Tensor] = {}
        self._entries: dict[str, receipt.Entry] = {}

    @torch.no_grad()
    def add(self, parameter: PlannedParameter, tensor: torch.Tensor) -> None:
        """tensor: the whole parameter in compute dtype. Kept until the rest of its scale group has come."""
        if parameter.group not in self._mine:
            return
        self._waiting[parameter.name] = tensor
        if not all(name in self._waiting for name in parameter.group):
            return
        group = {name: self._waiting.pop(name) for name in parameter.group}
        amax = torch.stack([weight_amax(t) for t in group.values()]).amax(0)
        g = global_scale_dec(amax)
        for name, member in group.items():
            for names, matrices in _matrices(self._plan[name], member):
                self._entries |= _entries(names, matrices, g)

    def collect(self) -> dict[str, receipt.Entry]:
        """The receipt of the whole model, on every rank. A collective. Raises RuntimeError on incomplete groups."""
        if self._waiting:
            raise RuntimeError(f"the weight stream ended without the rest of the group of {', '.join(self._waiting)}")
        if self._ranks == 1:
            return self._entries
        parts: list = [None] * self._ranks
        dist.all_gather_object(parts, self._entries)
        return {name: entry for part in parts for name, entry in part.items()}


def _matrices(parameter: PlannedParameter, tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Names and matrices, [E, N, K] per projection of fused experts, [N, K] for a linear."""
    rows = parameter.matrices()
    yield from zip(rows, tensor.chunk(len(rows), dim=-2), strict=True)


def _entries(names: tuple[str, ...], w: torch.Tensor, g: torch.Tensor) -> dict[str, receipt.Entry]:
    if w.dim() == 2:
        w, g = w.unsqueeze(0), g.reshape(1)
    step = max(1, _CHUNK // max(1, w[0].numel()))
    found: dict[str, receipt.Entry] = {}
    for first in range(0, w.shape[0], step):
        part = slice(first, first + step)
        packed = dispatch.quantize_weight(w[part], g[part])
        digests = receipt.digest(packed.packed, packed.block_scales)
        found |= receipt.entries(names[part], digests, packed.global_scale_dec)
    return found
