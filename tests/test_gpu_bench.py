"""The GPU benchmark as far as it can be tried without a GPU: it refuses, it checks, it writes."""

import csv
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import support_interpreter
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = [(3, 40, 48), (70, 24, 160)]

in_interpreter = support_interpreter.fixture()


@pytest.fixture(autouse=True)
def _import_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def timing(**changes):
    import gpu_bench

    line = gpu_bench.Timing(
        "2026-01-01T00:00:00+00:00", "abc", "H200", 90, "2", "3", "", "linear", "qkv", 4096, "torch bf16", "", True,
        100.0, 99.0, 101.0, 0.0, 1.0, 4000.0,
    )  # fmt: skip
    return replace(line, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_stops_with_one_line():
    run = subprocess.run([sys.executable, BENCHMARKS / "gpu_bench.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.strip().splitlines()[-1] == "gpu_bench needs a CUDA GPU; torch sees none. Nothing was timed."


def test_the_check_passes_on_right_kernels():
    import gpu_check

    device = torch.device(support_interpreter.DEVICE)
    assert "every bit" in gpu_check.quantizers(device, SMALL)
    assert "within" in gpu_check.products(device, False, SMALL)


@pytest.mark.parametrize("broken", ["quantizers", "order", "fake quantization", "products"])
def test_the_check_fails_on_wrong_kernels(broken, monkeypatch):
    import gpu_check

    device = torch.device(support_interpreter.DEVICE)
    right = gpu_check.activation.quantize
    if broken == "quantizers":
        monkeypatch.setattr(gpu_check.activation, "quantize", lambda x, **options: right(x * 1.01, **options))
        with pytest.raises(gpu_check.CheckFailed, match="kept 0: .* differ from torch"):
            gpu_check.quantizers(device, SMALL[:1])
    elif broken == "order":
        unordered = lambda x, **options: right(x, **{**options, "order": None})  # noqa: E731
        monkeypatch.setattr(gpu_check.activation, "quantize", unordered)
        with pytest.raises(gpu_check.CheckFailed, match="kept 5: .* differ from torch"):
            gpu_check.quantizers(device, SMALL[1:])
    elif broken == "fake quantization":
        monkeypatch.setattr(gpu_check.dispatch, "fake_quantize_weight", lambda w, g, backend: w)
        with pytest.raises(gpu_check.CheckFailed, match="fake-quantized weight differ from torch"):
            gpu_check.quantizers(device, SMALL[:1])
    else:
        right = gpu_check.w4a4_gemm
        monkeypatch.setattr(gpu_check, "w4a4_gemm", lambda *a, **k: right(*a, **k) * (1 + 1e-4))
        with pytest.raises(gpu_check.CheckFailed, match="x bound"):
            gpu_check.products(device, False, SMALL[:1])


def test_nothing_is_timed_after_a_failed_check(monkeypatch, capsys, tmp_path):
    import gpu_bench
    import gpu_check

    def fail(device, backend):
        raise gpu_check.CheckFailed("wrong")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(gpu_check, "verify", fail)
    monkeypatch.setattr(gpu_bench, "measure", lambda *args: pytest.fail("timed"))
    assert gpu_bench.main(["--out", str(tmp_path / "gpu.csv")]) == 1
    assert "the correctness check failed, nothing was timed: wrong" in capsys.readouterr().err
    assert not (tmp_path / "gpu.csv").exists()


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Cases that take a second each, on a clock that only they move."""
    import gpu_bench

    clock = [0.0]

    def run():
        clock[0] += 1.0

    def cases(device, backend, subjects, token_counts):
        import gpu_providers

        provider = {"torch bf16": gpu_providers.Provider(run)}
        return [gpu_bench.Case("linear", "qkv", tokens, lambda: provider) for tokens in token_counts]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "none")
    monkeypatch.setattr(gpu_bench, "passes", lambda device, backend: True)
    monkeypatch.setattr(gpu_bench, "copy_bandwidth", lambda device: 4000.0)
    monkeypatch.setattr(gpu_bench, "time_us", lambda run: run() or (1.0, 1.0, 1.0, True))
    monkeypatch.setattr(gpu_bench, "cases", cases)
    monkeypatch.setattr(gpu_bench.time, "monotonic", lambda: clock[0])


def test_operators_of_vllm_are_looked_up_under_the_names_that_it_calls():
    import gpu_providers

    ops = pytest.importorskip("vllm._custom_ops")
    for function, operator in gpu_providers.VLLM_OPERATORS.items():
        assert f"torch.ops._C.{operator}" in inspect.getsource(getattr(ops, function))


def test_a_competitor_that_fails_does_not_end_the_run(no_gpu_needed, monkeypatch, capsys):
    import gpu_bench
    import gpu_providers

    def refuse(*args):
        raise TypeError("another version")

    refuse.__name__ = "_vllm_linears"
    assert gpu_providers._peers(refuse, 1) == {}
    assert capsys.readouterr().err == "not timed, vllm_linears: TypeError: another version\n"

    def case(name):
        providers = {name: gpu_providers.Provider(refuse), "torch bf16": gpu_providers.Provider(lambda: None)}
        return [gpu_bench.Case("linear", "qkv", 16, lambda: providers)]

    def measured(name):
        facts = gpu_bench.environment(torch.device("cpu"))
        return [t.provider for t in gpu_bench.measure(torch.device("cpu"), case(name), facts, float("inf"), [])]

    assert measured("vllm fp8 linear") == ["torch bf16"]
    assert "not timed, vllm fp8 linear (linear qkv, 16 tokens): TypeError: another version" in capsys.readouterr().err
    with pytest.raises(TypeError, match="another version"):
        measured("quads linear emulated ratio 0")


def test_what_the_time_does_not_reach_is_named(no_gpu_needed, tmp_path, capsys):
    import gpu_bench

    arguments = ["--out", str(tmp_path / "gpu.csv"), "--tokens", "4096", "16", "1"]
    assert gpu_bench.main([*arguments, "--minutes", "0.025"]) == 0  # 1.5 s
    said = capsys.readouterr().out
    assert "2 lines added" in said and "not timed: linear qkv, 1 tokens" in said
    assert gpu_bench.main(arguments) == 0
    assert "not timed" not in capsys.readouterr().out
    assert len((tmp_path / "gpu.csv").read_text().splitlines()) == 1 + 2 + 3


def test_lines_are_added_and_other_columns_refused(tmp_path):
    import gpu_bench

    path = tmp_path / "results" / "gpu.csv"
    gpu_bench.append(path, [timing()])
    gpu_bench.append(path, [timing(provider="other"), timing(tokens=1)])
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["provider"] for line in lines] == ["torch bf16", "other", "torch bf16"]
    assert lines[0]["median_us"] == "100.0" and lines[2]["tokens"] == "1"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has columns"):
        gpu_bench.append(path, [timing()])


def test_goals_compare_with_the_right_lines():
    import gpu_bench

    lines = gpu_bench.goals(
        [
            timing(),
            timing(provider="quads gemm emulated ratio 0", median_us=150.0),
            timing(provider="quads gemm emulated ratio 0.5", median_us=180.0),
            timing(subject="quantizer", shape="K=2048", provider="quads ratio 0", gb_per_s=3300.0),
            timing(subject="quantizer", shape="K=2048", tokens=16, provider="quads ratio 0", gb_per_s=100.0),
            timing(
                subject="quantizer", shape="weight 5120x2048", tokens=0, provider="quads weight qdq", gb_per_s=1000.0
            ),
        ]
    )
    assert len(lines) == 5 and "MISSED  quads weight qdq, weight 5120x2048, 0 tokens: 25% of a copy" in lines
    assert "met     quads gemm emulated ratio 0, qkv, 4096 tokens: 0.67 of torch bf16" in lines
    assert "MISSED  quads gemm emulated ratio 0.5, qkv, 4096 tokens: 0.56 of torch bf16" in lines
    assert "MISSED  quads gemm emulated ratio 0.5, qkv, 4096 tokens: +20.0% over ratio 0" in lines
    assert "met     quads ratio 0, K=2048, 4096 tokens: 82% of a copy" in lines


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
def test_a_ratio_keeps_that_share_of_blocks(ratio):
    import gpu_providers

    from quads_ops.gemm import residual_form

    form = residual_form(gpu_providers.residual(ratio, 2048, torch.device("cpu")), 2048)
    assert form.kept == round(ratio * 128)


@pytest.mark.gpu(min_capability=(8, 0))
def test_the_whole_check_on_this_gpu():
    import gpu_check

    device = torch.device("cuda")
    native = torch.cuda.get_device_capability()[0] >= 10
    for backend in ("emulated", "native") if native else ("emulated",):
        assert len(list(gpu_check.verify(device, backend))) == 4
