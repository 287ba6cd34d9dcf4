"""`quads doctor`: what it finds here, and that each thing that can be missing is named with its remedy."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import quads_recipe
from quads_kernels import launch
from quads_ops import backends, compat, dispatch
from quads_recipe import doctor, paths

ROOT = Path(__file__).resolve().parent.parent


def statuses(find) -> dict[str, str]:
    return {check.name: check.status for check in find()}


@pytest.mark.integration
def test_command_reports_this_environment_as_healthy():
    command = [str(Path(sys.executable).with_name("quads")), "doctor", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    report = json.loads(result.stdout)
    missing = [check for check in report["checks"] if check["status"] == doctor.MISSING]
    assert missing == [] and report["ok"] and result.returncode == 0, result.stderr
    names = {check["name"] for check in report["checks"]}
    assert {"torch", "vllm", "verl", "device", "path", "vllm plugin", "verl plugin", "/dev/shm", "memory"} <= names
    assert {"C++ compiler", "ray imports", "configs", "policy natural", "policy outlier"} <= names


def test_exit_status_and_text_follow_the_findings(monkeypatch, capsys):
    good = doctor.Check("thing", doctor.OK, "here")
    bad = doctor.Check("other", doctor.MISSING, "nowhere", "fetch it")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [good],))
    assert doctor.main([]) == 0
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [good], lambda: [bad]))
    capsys.readouterr()
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "nowhere" in text and "-> fetch it" in text and "1 missing: other" in text
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.fixture
def gpu(monkeypatch):
    """Makes a device as if a GPU of this compute capability were there. Nothing runs on it."""

    def make(capability: int | None) -> torch.device:
        backends._decide.cache_clear()
        monkeypatch.setattr(launch, "capability", lambda device: capability if device.type == "cuda" else 0)
        return torch.device("cpu") if capability is None else torch.device("cuda", 0)

    monkeypatch.delenv("QUADS_BACKEND", raising=False)
    yield make
    backends._decide.cache_clear()


@pytest.mark.parametrize(
    ("capability", "status", "text"),
    [
        (None, doctor.OK, "cpu: torch emulated, quantized in "),
        (75, doctor.MISSING, "the kernels need compute capability 8.0"),
        (80, doctor.NOTE, "ampere: triton emulated, not tried"),
        (90, doctor.OK, "hopper: triton emulated"),
        (100, doctor.OK, "blackwell: triton native"),
        (120, doctor.OK, "blackwell: triton native"),
    ],
)
def test_path_is_what_the_dispatch_says(capability, status, text, gpu):
    check = doctor.path(gpu(capability))
    assert check.status == status and text in check.found
    assert check.found.startswith(dispatch.describe(gpu(capability)))


def test_a_demanded_backend_shows(gpu, monkeypatch):
    monkeypatch.setenv("QUADS_BACKEND", "torch")
    check = doctor.path(gpu(90))
    assert check.status == doctor.NOTE and check.found == dispatch.describe(gpu(90)) and "QUADS_BACKEND" in check.remedy
    monkeypatch.setenv("QUADS_BACKEND", "native")
    check = doctor.path(gpu(90))
    assert check.status == doctor.MISSING and "sm_90 has no NVFP4 tensor cores" in check.found
    monkeypatch.setenv("QUADS_BACKEND", "fast")
    assert "unknown backend 'fast'" in doctor.path(gpu(None)).found


def test_path_is_that_of_the_device_that_torch_sees():
    here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    assert next(check for check in doctor.device() if check.name == "path") == doctor.path(here)


def test_untried_version_is_missing_until_allowed(monkeypatch):
    monkeypatch.setitem(compat.TRIED_VERSIONS, "verl", ("0.1.0",))
    check = next(check for check in doctor.versions() if check.name == "verl")
    assert check.status == doctor.MISSING and "verl==0.1.0" in check.remedy
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    assert statuses(doctor.versions)["verl"] == doctor.NOTE


def test_plugins_are_registered_here():
    assert statuses(doctor.plugins) == {"verl plugin": doctor.OK, "vllm plugin": doctor.OK}


def test_unregistered_plugin_is_missing(monkeypatch):
    real = importlib.metadata.entry_points
    absent = importlib.metadata.EntryPoints()
    monkeypatch.setattr(
        doctor.metadata, "entry_points", lambda group: absent if group == "verl.plugins" else real(group=group)
    )
    found = {check.name: check for check in doctor.plugins()}
    assert found["verl plugin"].status == doctor.MISSING and "not registered" in found["verl plugin"].found
    assert found["vllm plugin"].status == doctor.OK


def test_plugin_that_leads_elsewhere_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(quads_recipe, "__file__", str(tmp_path / "__init__.py"))
    assert statuses(doctor.plugins)["verl plugin"] == doctor.MISSING


def write_egg_info(folder: Path, entry_points: str) -> Path:
    info = folder / "quads_rl.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: quads-rl\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(entry_points)
    return info


def test_stale_metadata_is_found_and_really_hides_plugins(tmp_path, monkeypatch):
    info = write_egg_info(tmp_path, "[vllm.general_plugins]\nold_name = quads_ops.vllm_plugin:register\n")
    code = "from importlib.metadata import entry_points as e; print([x.name for x in e(group='verl.plugins')])"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "quads" not in result.stdout  # why it matters
    monkeypatch.chdir(tmp_path)
    (check,) = doctor.stale_metadata()
    assert check.status == doctor.MISSING and str(info) in check.remedy
    assert "verl.plugins" in check.found and "vllm.general_plugins" in check.found
    # From another directory the console script's sys.path has no such entry: nothing to report.
    monkeypatch.chdir(tmp_path.parent)
    assert list(doctor.stale_metadata()) == []


def test_metadata_that_agrees_is_a_note(tmp_path, monkeypatch):
    lines = (f"[{group}]\n{name} = {value}\n" for group, (name, value) in doctor.PLUGINS.items())
    write_egg_info(tmp_path, "\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert statuses(doctor.stale_metadata) == {"stale metadata": doctor.NOTE}


def test_small_shared_memory_is_missing(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    (check,) = doctor.shared_memory()
    assert check.status == doctor.MISSING and "--shm-size" in check.remedy


@pytest.mark.parametrize(
    ("total", "available", "status"),
    [(4, 4, doctor.MISSING), (16, 4, doctor.NOTE), (16, 12, doctor.OK)],
)
def test_memory_is_judged_by_total_then_available(monkeypatch, total, available, status):
    monkeypatch.setattr(doctor, "memory_limits", lambda: (total * doctor.GIB, available * doctor.GIB))
    assert statuses(doctor.memory) == {"memory": status}


def test_absent_compiler_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert statuses(doctor.compiler)["C++ compiler"] == doctor.MISSING


def test_kernel_in_torch_is_a_note_and_a_failing_build_is_missing(monkeypatch):
    from quads_ops import cpu_build, cpu_qdq

    monkeypatch.setattr(cpu_qdq, "path", lambda: cpu_qdq.Path("torch", "no compiler"))
    assert statuses(doctor.cpu_kernel) == {"CPU kernel": doctor.NOTE}

    def fail():
        raise cpu_build.BuildError("g++ failed")

    monkeypatch.setattr(cpu_qdq, "path", fail)
    (check,) = doctor.cpu_kernel()
    assert check.status == doctor.MISSING and check.found == "g++ failed"


def test_absent_policy_and_configs_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "_HERE", tmp_path / "a" / "b")
    found = statuses(doctor.shipped_files)
    assert found == {name: doctor.MISSING for name in ("configs", "policy natural", "policy outlier")}


def test_policy_without_weights_is_missing(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(paths, "policy_dir", lambda _: tmp_path)
    assert statuses(doctor.shipped_files)["policy natural"] == doctor.MISSING


def test_flash_attention_is_looked_for_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert list(doctor.attention()) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for version, status in ((None, doctor.NOTE), ("2.8.3", doctor.OK)):
        monkeypatch.setattr(doctor.compat, "installed_version", lambda name, version=version: version)
        [check] = doctor.attention()
        assert check.status == status and ("attn_implementation=sdpa" in check.remedy) == (version is None)
