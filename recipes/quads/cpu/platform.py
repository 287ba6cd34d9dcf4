"""A platform for verl that has no accelerator: gloo, shared memory for the weight sync, logical slots in Ray."""

from __future__ import annotations

import os
import resource
import types
from contextlib import contextmanager

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

# What the rollout's processes must inherit on a CPU.
ROLLOUT_ENV = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "VERL_PLATFORM")


class CpuDeviceId(str):
    """verl uses one value both as `.to(id)`, which needs "cpu", and in f"{name}:{id}", which needs an index."""

    def __new__(cls):
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


class _CpuModule(types.ModuleType):
    """torch.cpu, plus the calls that verl makes on torch.cuda. Memory figures are those of this process, in bytes."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    is_available = staticmethod(lambda: True)
    empty_cache = staticmethod(lambda: None)
    ipc_collect = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda *_: "CPU")
    memory_allocated = staticmethod(lambda *_: psutil.Process().memory_info().rss)
    memory_reserved = memory_allocated
    max_memory_allocated = staticmethod(lambda *_: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    max_memory_reserved = max_memory_allocated
    reset_peak_memory_stats = staticmethod(lambda *_: None)
    reset_accumulated_memory_stats = reset_peak_memory_stats
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = manual_seed
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    @staticmethod
    def mem_get_info(*_):
        memory = psutil.virtual_memory()
        return memory.available, memory.total


_MODULE = _CpuModule("quads_recipe.cpu.device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """verl's PlatformBase (verl/plugin/platform/platform_base.py) for a machine without accelerators."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _MODULE

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False  # never chosen by detection, only by VERL_PLATFORM=cpu

    def current_device(self):
        return CpuDeviceId()

    def device_count(self):
        return 1

    def set_device(self, device_index):
        return None

    def synchronize(self, device_index=None):
        return None

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        return None

    def empty_cache(self):
        return None

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"  # verl counts only GPU and NPU; Ray is told of logical ones (ray_init.num_gpus) and does not check

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # makes verl's weight transfer use POSIX shared memory

    def rollout_env_vars(self):
        return {name: os.environ[name] for name in ROLLOUT_ENV if name in os.environ}

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        return None

    def profiler_stop(self):
        return None

    def cudart(self):
        return None
