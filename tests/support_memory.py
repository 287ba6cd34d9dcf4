"""Live tensor memory, counted without an allocator's help, so that it works on a CPU and is the same in every run."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that an operation inside the context has touched and that are still alive.

    `peak` is the largest sum after any operation. Temporaries inside one operation are not seen. A storage that FSDP
    has resized to nothing counts nothing.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, out))
        new = [self._track(x) for x in leaves if type(x) in (torch.Tensor, torch.nn.Parameter)]
        if any(new) or "resize" in func.name():  # nothing else makes the sum grow
            self.peak = max(self.peak, self.live())
        return out

    def _track(self, tensor: torch.Tensor) -> bool:
        """Whether its storage was not known yet."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and not known.expired():
            return False
        self._storages[storage._cdata] = StorageWeakRef(storage)
        return True

    def live(self) -> int:
        """Bytes alive now."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
