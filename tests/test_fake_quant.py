"""Fake-quantized modules compute what plain modules with rounded weights compute, forward and backward."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import support_models
import torch
import torch.nn.functional as F
from transformers.integrations import moe

from quads_ops import compat, fake_quant_recompute, nvfp4
from quads_ops.fake_quant import convert
from quads_ops.residual import compensate
from quads_ops.targets import Targets
from quads_ops.weights import fake_quantize_weight, weight_amax

EXPERTS = ("eager", "grouped_mm", "batched_mm")
CASES = [("qwen3", None), ("llama", None)] + [(f, impl) for f in support_models.MOE_FAMILIES for impl in EXPERTS]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the gradient of an index adds in another order with several
    yield
    torch.set_num_threads(threads)


def build(family: str, experts: str | None = "grouped_mm", **kwargs):
    model = support_models.tiny_model(family, **kwargs)
    if family in support_models.MOE_FAMILIES:
        model.set_experts_implementation(experts)
        if experts == "batched_mm":
            compat.let_batched_mm_train()  # for the models compared with; `convert` does it for its own
    return model


def rounded(model, dtype: torch.dtype | None = None):
    """A copy of the model whose leaf weights are the NVFP4 values, found by name and without the code under test.

    dtype: compute dtype, if it is not that of the parameters.
    """
    model = copy.deepcopy(model)
    weights = dict(model.named_parameters())

    def write(names):
        groups = [weights[n].data.to(dtype or weights[n].dtype) for n in names]
        amax = torch.stack([w.float().abs().amax((-1, -2)) for w in groups]).amax(0)
        g = nvfp4.global_scale_dec(amax)
        for name, w in zip(names, groups, strict=True):
            weights[name].data.copy_(nvfp4.qdq(w, g.unsqueeze(-1)).to(w.dtype))

    for name in weights:
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if last == "q_proj":
            write([f"{prefix}.{p}.weight" for p in ("q_proj", "k_proj", "v_proj")])
        elif last == "gate_proj":
            write([f"{prefix}.{p}.weight" for p in ("gate_proj", "up_proj")])
        elif last in ("o_proj", "down_proj", "gate_up_proj"):
            write([name])
    return model


def loss_and_gradients(model, batch=None):
    batch = support_models.tiny_batch() if batch is None else batch
    model.zero_grad()
    loss = model(batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert not [name for name in a[1] if not torch.equal(a[1][name], b[1][name])]


@pytest.mark.parametrize("family,experts", CASES)
def test_loss_and_gradients_equal_those_of_rounded_weights(family, experts):
    model = build(family, experts)
    expected = loss_and_gradients(rounded(model))
    plain = loss_and_gradients(copy.deepcopy(model))
    convert(model, Targets("all_linear"), "w4a16")
    got = loss_and_gradients(model)
    assert_equal(got, expected)
    assert abs(got[0] - plain[0]) > 1e-4  # so rounding matters here at all


@pytest.fixture
def batched_mm_of_5_9(monkeypatch):
    """transformers' `batched_mm` as 5.9.0 has it: it clamps the routing in place."""
    original = moe.batched_mm_experts_forward

    def clamps_in_place(self, hidden_states, top_k_index, top_k_weights):
        top_k_index.clamp_(0, self.num_experts - 1)
        return original(self, hidden_states, top_k_index.clone(), top_k_weights)

    monkeypatch.setattr(compat, "installed_version", {"transformers": "5.9.0"}.get)
    monkeypatch.setattr(moe, "batched_mm_experts_forward", clamps_in_place)
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", clamps_in_place)


@pytest.mark.parametrize("family", support_models.MOE_FAMILIES)
def test_batched_mm_trains_though_it_clamps_the_routing_in_place(family, batched_mm_of_5_9):
    model = support_models.tiny_model(family)
    model.set_experts_implementation("batched_mm")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_and_gradients(model)
    stock = copy.deepcopy(model)
    convert(model, Targets("all_linear"), "w4a16")
    assert_equal(loss_and_gradients(model), loss_and_gradients(rounded(stock)))


def test_the_accepted_transformers_trains_with_batched_mm_once_it_is_let():
    """The installed one as it is, in a process where nothing else was imported, and what was changed in it."""
    code = (
        "import support_models; from transformers import __version__; from transformers.integrations import moe\n"
        "from quads_ops import compat\n"
        "before = moe.ALL_EXPERTS_FUNCTIONS['batched_mm']\n"
        "for _ in range(2):\n"
        "    compat.let_batched_mm_train()\n"
        "    print(__version__, moe.ALL_EXPERTS_FUNCTIONS['batched_mm'] is before)\n"
        "    model, batch = support_models.tiny_model('qwen3_moe'), support_models.tiny_batch()\n"
        "    model.set_experts_implementation('batched_mm')\n"
        "    model(batch, labels=batch).loss.backward()\n"
    )
    folder = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, untouched = done.stdout.splitlines()[-1].split()
    assert untouched == str(not version.startswith("5.9."))  # 5.10 is left as it is


@pytest.mark.parametrize("family,experts", [("qwen3", None), ("qwen2_moe", "eager"), ("qwen2_moe", "grouped_mm")])
def test_bf16_weights(family, experts):
    model = build(family, experts, dtype=torch.bfloat16)
    expected = loss_and_gradients(rounded(model))
    convert(model, Targets("all_linear"), "w4a16")
    assert_equal(loss_and_gradients(model), expected)


@pytest.mark.parametrize("family,experts", [("qwen3", None), ("qwen3_moe", "eager")])
def test_autocast_quantizes_the_weight_in_compute_dtype(family, experts):
    model = build(family, experts)
    expected = rounded(model, torch.bfloat16)
    wrong = rounded(model)  # from the FP32 master: other codes
    convert(model, Targets("all_linear"), "w4a16")
    with torch.autocast("cpu", torch.bfloat16):
        results = [loss_and_gradients(m) for m in (model, expected, wrong)]
    assert_equal(results[0], results[1])
    assert results[0][0] != results[2][0]
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_mode_none_is_the_stock_model_and_touches_no_rng():
    model = build("qwen2_moe")
    batch = support_models.tiny_batch()
    stock = model(batch).logits
    control = convert(model, Targets("all_linear"), "w4a16")
    quantized = model(batch).logits
    state = torch.get_rng_state()
    with control.use_mode("none"):
        assert torch.equal(model(batch).logits, stock)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(batch).logits, quantized)
    assert not torch.equal(quantized, stock)


@pytest.mark.parametrize("experts", EXPERTS)
def test_each_weight_is_quantized_once_per_forward_and_once_per_backward(experts, monkeypatch):
    calls = []
    original = fake_quant_recompute.fake_quantize
    monkeypatch.setattr(
        fake_quant_recompute, "fake_quantize", lambda w, g, dtype: calls.append(w.shape) or original(w, g, dtype)
    )
    model = build("qwen3_moe", experts)
    control = convert(model, Targets("all_linear"), "w4a16")
    batch = support_models.tiny_batch()
    loss = model(batch, labels=batch).loss
    weights = 2 * (4 + 2)  # two layers: q, k, v, o, gate_up, down
    assert len(calls) == weights
    assert set(control.runs.values()) == {1}
    loss.backward()
    copies = 2 * 2 if experts == "batched_mm" else 0  # saves its own copies per token, as without quantization
    assert len(calls) == 2 * weights - copies


def test_gradients_are_the_same_again_over_a_kept_graph():
    model = build("qwen3_moe", "eager")
    convert(model, Targets("all_linear"), "w4a16")
    batch = support_models.tiny_batch()
    loss = model(batch, labels=batch).loss
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_recomputed_outlives_its_module_s_backward(monkeypatch):
    recipes = []

    class Watched(fake_quant_recompute._Recipe):
        def __init__(self, *args):
            super().__init__(*args)
            recipes.append(self)

    monkeypatch.setattr(fake_quant_recompute, "_Recipe", Watched)
    model = build("qwen3_moe", "eager")
    convert(model, Targets("all_linear"), "w4a16")
    kept = []
    layers = model.model.layers
    layers[0].register_full_backward_pre_hook(lambda *_: kept.append(sum(r._kept is not None for r in recipes)))
    batch = support_models.tiny_batch()
    model(batch, labels=batch).loss.backward(retain_graph=True)
    assert len(recipes) == 12
    assert kept == [0]  # layer 1 is done
    assert not [r for r in recipes if r._kept is not None]


def test_frozen_weights_pass_the_gradient_on():
    model = build("qwen3_moe", "eager")
    expected = rounded(model)
    convert(model, Targets("all_linear"), "w4a16")
    gradients = []
    for m in (model, expected):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("embed" in name)
        batch = support_models.tiny_batch()
        m(batch, labels=batch).loss.backward()
        gradients.append(m.get_input_embeddings().weight.grad)
    assert torch.equal(*gradients)


def test_a_weight_changed_between_forward_and_backward_is_refused():
    model = build("qwen3", None)
    convert(model, Targets("all_linear"), "w4a16")
    batch = support_models.tiny_batch()
    loss = model(batch, labels=batch).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(recompute, reentrant):
    model = build("qwen3_moe").train()
    expected = loss_and_gradients(rounded(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    control = convert(model, Targets("all_linear"), "w4a16", recompute=recompute)
    assert_equal(loss_and_gradients(model), expected)
    assert set(control.runs.values()) == {2}


def test_hooks_outside_still_see_activations_but_no_quantized_weight():
    """Activation offload works through such hooks; it must not move weights."""
    model = build("qwen3_moe")
    expected = loss_and_gradients(rounded(model))
    convert(model, Targets("all_linear"), "w4a16")
    batch = support_models.tiny_batch()
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        model.zero_grad()
        loss = model(batch, labels=batch, use_cache=False).loss
    loss.backward()
    assert_equal((loss.item(), {n: p.grad for n, p in model.named_parameters()}), expected)
    experts = model.model.layers[0].mlp.experts
    shapes = {experts.gate_up_proj.shape, experts.gate_up_proj.mT.shape, experts.down_proj.shape}
    assert not [t.shape for t in packed if t.shape in shapes]
    tokens = batch.numel() * 2
    assert [t for t in packed if t.shape == (tokens, experts.gate_up_proj.shape[-1])]  # the experts' inputs
    assert unpacked


@contextlib.contextmanager
def quantized_activations(model):
    """Independent w4a4: inputs of all linears, and the experts in a plain loop, with `x + (q - x).detach()`."""

    def quantize(x):
        return x + (compensate(x.reshape(-1, x.shape[-1]), "w4a4", None).view(x.shape) - x).detach()

    def linear(module, args):
        return (quantize(args[0]),)

    def experts(module, hidden, index, weights):
        out = torch.zeros_like(hidden)
        hidden = quantize(hidden)
        for token in range(hidden.shape[0]):
            for expert, weight in zip(index[token], weights[token], strict=True):
                gate, up = F.linear(hidden[token : token + 1], module.gate_up_proj[expert]).chunk(2, -1)
                inner = quantize(module.act_fn(gate) * up)
                out[token] = out[token] + weight * F.linear(inner, module.down_proj[expert])[0]
        return out

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last.endswith("_proj") and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(linear)
        if last == "experts":
            module.forward = experts.__get__(module)
    yield model


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_w4a4_quantizes_activations_too(family):
    model = build(family)
    batch = support_models.tiny_batch(rows=1, length=8)
    weights_only = copy.deepcopy(model)
    convert(weights_only, Targets("all_linear"), "w4a16")
    with quantized_activations(rounded(model)) as reference:
        expected = loss_and_gradients(reference, batch)
    convert(model, Targets("all_linear"), "w4a4")
    got = loss_and_gradients(model, batch)
    # A sum in another order can move an activation across a rounding boundary; those that move are few and small.
    assert got[0] == pytest.approx(expected[0], abs=2e-3)
    assert abs(got[0] - loss_and_gradients(weights_only, batch)[0]) > 5e-3
    for name, gradient in got[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=0.1, atol=0.05 * expected[1][name].abs().max())


def test_fake_quantize_in_chunks_equals_the_whole(monkeypatch):
    monkeypatch.setitem(fake_quant_recompute._CHUNK, "cpu", 32 * 5)
    monkeypatch.setattr(fake_quant_recompute.cpu_qdq, "takes", lambda x: False)
    for shape in [(7, 32), (3, 7, 32), (5, 2, 32)]:
        w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        g = nvfp4.global_scale_dec(weight_amax(w))
        got = fake_quant_recompute.fake_quantize(w, g, torch.bfloat16)
        assert torch.equal(got, fake_quantize_weight(w, g))
