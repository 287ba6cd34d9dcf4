"""What every test gets: a fixed environment and seed, and its place in the order (cheap tests first).

Markers: unit (the default), integration, e2e, gpu(min_capability=(major, minor)). The limit of 300 s per test is in
setup.cfg; a test that needs more says `@pytest.mark.timeout(seconds)`.
"""

import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# Before torch, vLLM or Ray is imported, and inherited by what tests start. A value that is already set stays.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
    "MPLBACKEND": "Agg",
    # verl reads it when it is imported, so a test that sets it later comes too late if another one has imported verl.
    "VERL_PLATFORM": "cpu",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Started in the background of a script, pytest and all that it starts would ignore Ctrl-C, which some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

KINDS = ("unit", "integration", "e2e")


def pytest_collection_modifyitems(items):
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(pytest.mark.unit)
    # The sort is stable: within a kind, tests stay in the order of files.
    items.sort(key=lambda item: max(n for n, kind in enumerate(KINDS) if item.get_closest_marker(kind)))


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch sees none")
    needed = tuple(marker.kwargs.get("min_capability", (0, 0)))
    found = torch.cuda.get_device_capability()
    if found < needed:
        pytest.skip(f"needs compute capability {needed[0]}.{needed[1]}; this GPU has {found[0]}.{found[1]}")


@pytest.fixture(autouse=True)
def _seeded():
    """The same random numbers for a test, alone or in the suite."""
    import numpy
    import torch

    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture
def short_dir():
    """An empty directory with a short path, removed afterwards: a Unix socket path may have 107 bytes at most."""
    base = "/tmp" if os.access("/tmp", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="q", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def ray_dir(short_dir, monkeypatch):
    """A private directory for a Ray that this test, or a process that it starts, brings up (RAY_TMPDIR)."""
    monkeypatch.setenv("RAY_TMPDIR", str(short_dir))
    return short_dir
