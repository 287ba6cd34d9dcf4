"""Runs kernel tests in Triton's interpreter, inside an ordinary pytest run.

Triton reads TRITON_INTERPRET when a kernel is defined, so one process cannot have both. A test file that says

    import support_interpreter
    in_interpreter = support_interpreter.fixture()

has its selected tests run in a child pytest with TRITON_INTERPRET=1, which all such files share; it starts with the
first of them, and goes on while other tests run here. Each test here waits for its own outcome from there.
Where the interpreter is on already (`TRITON_INTERPRET=1 pytest tests/test_kernel_rounding.py`, to debug), the
tests simply run. Fixtures run in both processes, so a kernel may be launched in a test only, not in a fixture.
`QUADS_TEST_DEVICE=cuda pytest tests/test_kernel_*.py` runs the same tests, compiled, on a GPU.

`make kernels-test-gpu-pins` runs them with the Triton of a GPU install.
"""

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

DEVICE = os.environ.get("QUADS_TEST_DEVICE", "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parent.parent
TEST_TIMEOUT_S = 240
"""Of a test in the child; shorter than that of the test which waits for it (setup.cfg)."""

_child: "Child | None" = None


def fixture():
    """The fixture that a test file must call `in_interpreter`; it applies to every test of that file."""

    @pytest.fixture(autouse=True)
    def in_interpreter(request, tmp_path_factory):
        global _child
        if INTERPRETED or DEVICE != "cpu":
            return
        if _child is None:
            tests = [item.nodeid for item in request.session.items if "in_interpreter" in item.fixturenames]
            _child = Child(tests, tmp_path_factory.mktemp("interpreter"))
            request.config.add_cleanup(_child.stop)
        outcome, text = _child.outcome(request.node.nodeid)
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(f"in the interpreter: {text}", pytrace=False)
        # It passed in the child; here there is nothing left to run.
        request.node.obj = lambda **_: None

    return in_interpreter


class Child:
    """A pytest that runs tests in the interpreter, in their order."""

    def __init__(self, tests: list[str], folder: Path):
        results, self.output = folder / "outcomes.jsonl", folder / "output.txt"
        results.touch()
        self.results, self.rest, self.lines = results.open(), "", defaultdict(list)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT_S}"]
        command += ["-p", "support_outcomes", f"--outcomes={results}", *tests]
        path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def outcome(self, test: str) -> tuple[str, str]:
        """("passed" | "failed" | "skipped", text) of a test, as soon as it has one."""
        while True:
            ended = self.process.poll() is not None  # before the last look at the results
            self._read()
            if any(line["when"] == "teardown" for line in self.lines[test]):
                bad = (line for line in self.lines[test] if line["outcome"] != "passed")
                return next(((line["outcome"], line["text"]) for line in bad), ("passed", ""))
            if ended:
                return "failed", f"the child pytest did not run this test:\n{self.output.read_text()[-4000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.results.close()

    def _read(self) -> None:
        """Take in what is new; the last line may be half written."""
        *whole, self.rest = (self.rest + self.results.read()).split("\n")
        for line in map(json.loads, whole):
            self.lines[line["test"]].append(line)


@triton.jit
def _fma_kernel(x, y, z, out):
    tl.store(out, tl.fma(tl.load(x), tl.load(y), tl.load(z)))


def _patch_triton_once() -> None:
    """Keep the interpreter from patching triton.language anew at every call of a device function, which takes half of
    its time: not where the modules that the function sees are patched already."""
    original = getattr(interpreter, "_patch_lang", None)
    if original is None or not hasattr(interpreter, "_LangPatchScope"):  # another Triton: slower, that is all
        return

    @functools.cache
    def modules(fn) -> list:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch(fn):
        if any(tl.core.is_builtin(module.load) for module in modules(fn)):
            return original(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


if INTERPRETED:
    _patch_triton_once()


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
