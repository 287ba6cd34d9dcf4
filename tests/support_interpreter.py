"""Runs a file of kernel tests in Triton's interpreter, inside an ordinary pytest run.

Triton reads TRITON_INTERPRET when a kernel is defined, so one process cannot have both. A test file that says

    import support_interpreter
    in_interpreter = support_interpreter.fixture()

has its selected tests run in ONE child pytest with TRITON_INTERPRET=1; each test here then reports its own outcome from
there. Where the interpreter is on already (`TRITON_INTERPRET=1 pytest tests/test_kernel_rounding.py`, to debug), the
tests simply run. Fixtures run in both processes, so a kernel may be launched in a test only, not in a fixture.
`QUADS_TEST_DEVICE=cuda pytest tests/test_kernel_*.py` runs the same tests, compiled, on a GPU.

Another Triton, in a venv of its own: `pip install torch==2.13.0 triton==3.6.0 'numpy<2.3' pytest pytest-timeout`, this
package with `pip install --no-deps`, then `python -m pytest tests/test_kernel_*.py`. (With a newer numpy, Triton 3.6's
interpreter fails on loop bounds: 1-element arrays no longer convert to int.)
"""

import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

DEVICE = os.environ.get("QUADS_TEST_DEVICE", "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parent.parent
CHILD_TIMEOUT_S = 280

Outcome = tuple[str, str]
_outcomes: dict[Path, dict[str, Outcome]] = {}


def fixture():
    """The fixture a test file assigns to a name of its own; it applies to every test of that file."""

    @pytest.fixture(autouse=True)
    def in_interpreter(request, tmp_path_factory):
        if INTERPRETED or DEVICE != "cpu":
            return
        path = request.node.path
        if path not in _outcomes:
            selected = [item.name for item in request.session.items if item.path == path]
            _outcomes[path] = _run_child(path, selected, tmp_path_factory.mktemp("interpreter"))
        outcome, text = _outcomes[path].get(request.node.name, ("failure", "the child pytest did not run this test"))
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(f"in the interpreter: {text}", pytrace=False)
        # It passed in the child; here there is nothing left to run.
        request.node.obj = lambda **_: None

    return in_interpreter


def _run_child(path: Path, selected: list[str], folder: Path) -> dict[str, Outcome]:
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += [f"{path}::{name}" for name in selected]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    if not report.exists():
        pytest.fail(f"the child pytest gave no report:\n{child.stdout[-4000:]}{child.stderr[-4000:]}", pytrace=False)
    return {case.get("name"): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _outcome(case: ET.Element) -> Outcome:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            return kind, found.text if kind != "skipped" else found.get("message", "")
    return "passed", ""


@triton.jit
def _fma_kernel(x, y, z, out):
    tl.store(out, tl.fma(tl.load(x), tl.load(y), tl.load(z)))


def skip_unless_fma_is_exact() -> None:
    """Skip what needs an FMA that rounds once: (1 + 2^-12)^2 - 1 has a term that a product rounded to FP32 loses."""
    if DEVICE != "cpu":
        return
    x, out = torch.tensor([1 + 2.0**-12]), torch.zeros(1)
    _fma_kernel[(1,)](x, x, torch.tensor([-1.0]), out)
    if out.item() != 2.0**-11 + 2.0**-24:
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds an FMA twice")


class GuardedOutputs:
    """Poisons every output of a launcher, and sees what a kernel writes beside it."""

    MARGIN = 4096  # bytes

    def __init__(self, monkeypatch):
        self._buffers: list[torch.Tensor] = []
        monkeypatch.setattr("quads_kernels.launch.empty", self._empty)

    def _empty(self, shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = math.prod(shape) * dtype.itemsize
        # 0xFF makes NaN in every float format, and no scale byte or pair of codes in the tests is all ones.
        buffer = torch.full((count + 2 * self.MARGIN,), 0xFF, dtype=torch.uint8, device=device)
        self._buffers.append(buffer)
        return buffer[self.MARGIN : self.MARGIN + count].view(dtype).view(shape)

    def check_margins(self) -> None:
        """Assert that outputs were taken from here, and that nothing was written beside them."""
        assert self._buffers
        for buffer in self._buffers:
            assert (buffer[: self.MARGIN] == 0xFF).all() and (buffer[-self.MARGIN :] == 0xFF).all()


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality of shape, dtype and every bit, where any NaN equals any other."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    )
    if expected.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places"
        bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
        actual, expected = (torch.where(t.isnan(), 0.0, t).view(bits) for t in (actual, expected))
    wrong = int((actual != expected).sum())
    assert wrong == 0, f"{wrong} of {expected.numel()} elements differ"
