"""The squared gradients of the quantized inputs, against autograd on a model whose experts are plain linears."""

from __future__ import annotations

import itertools

import pytest
import support_models
import torch
import torch.nn.functional as F
from torch import nn

from quads_ops.fake_quant import convert
from quads_ops.matrix_plan import plan_parameters
from quads_ops.targets import Targets
from quads_recipe.analysis.gradients import GradientError, InputGradients, Squares, means, random_signs
from quads_recipe.analysis.score import Sample, differentiable_logprobs, logprobs, make_batch

SAMPLES = [Sample((7, 9, 11), (8, 6)), Sample((12, 10), (9,))]  # of unequal length, so one is padded
SIGNS = [torch.tensor(signs) for signs in itertools.product((1.0, -1.0), repeat=3)]


class UnfusedExperts(nn.Module):
    """Experts as three linears each, and the inputs that they saw."""

    def __init__(self, fused: nn.Module):
        super().__init__()
        self.act_fn, self.x, self.inner = fused.act_fn, None, {}
        self.gate_up = [w.detach().clone() for w in fused.gate_up_proj]
        self.down = [w.detach().clone() for w in fused.down_proj]

    def forward(self, hidden, index, weights):
        self.x = hidden.clone()  # apart from what the router does with it
        out = torch.zeros_like(hidden)
        for expert, (w13, w2) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, slot = torch.where(index == expert)
            gate, up = F.linear(self.x[token], w13).chunk(2, -1)
            self.inner[expert] = self.act_fn(gate) * up
            out = out.index_add(0, token, F.linear(self.inner[expert], w2) * weights[token, slot, None])
        return out


def reference(family: str, quantized: bool) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A plain model with the rounded weights, and input -> the module that gets it."""
    model = support_models.tiny_model(family)
    if quantized:
        converted = support_models.tiny_model(family)
        convert(converted, Targets("all_linear"), "w4a16")
        for name, module in converted.named_modules():
            _round(module, model.get_submodule(name))
    model.requires_grad_(False)
    watched = {}
    for i, layer in enumerate(model.model.layers):
        base, mlp = f"model.layers.{i}", layer.mlp
        watched[f"{base}.self_attn.qkv_proj"] = layer.self_attn.q_proj
        watched[f"{base}.self_attn.o_proj"] = layer.self_attn.o_proj
        for name, dense in ((f"{base}.mlp", mlp), (f"{base}.mlp.shared_expert", getattr(mlp, "shared_expert", None))):
            if hasattr(dense, "down_proj"):
                watched[f"{name}.gate_up_proj"], watched[f"{name}.down_proj"] = dense, dense.down_proj
        if hasattr(mlp, "experts"):
            mlp.experts = watched[f"{base}.mlp.experts"] = UnfusedExperts(mlp.experts)
    return model, watched


def _round(converted: nn.Module, plain: nn.Module) -> None:
    """The weights of a converted module, as it multiplies with them, into a plain one."""
    from quads_ops.fake_quant_recompute import fake_quantize
    from quads_ops.fake_quant_scales import expert_scales

    quads = getattr(converted, "quads", None)
    if quads is None:
        return
    with torch.no_grad():
        if isinstance(converted, nn.Linear):
            plain.weight.copy_(fake_quantize(converted.weight, quads.group.scale(torch.float32), torch.float32))
            return
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(converted, name)
            getattr(plain, name).copy_(fake_quantize(w, expert_scales(w, torch.float32), torch.float32))


def expected(family: str, quantized: bool, signs: torch.Tensor) -> dict[str, Squares]:
    """By autograd, one gradient per input, sample by sample without padding."""
    model, watched = reference(family, quantized)
    inputs = {}
    for name, module in watched.items():
        if not isinstance(module, UnfusedExperts):
            module.register_forward_pre_hook(lambda _, args, name=name: _seen(inputs, name, *args))
    totals: dict[str, Squares] = {}
    start = 0
    for sample in SAMPLES:
        embeddings = model.model.embed_tokens.register_forward_hook(lambda _, args, out: out.detach().requires_grad_())
        chosen = differentiable_logprobs(model, make_batch([sample]))
        embeddings.remove()
        loss = (chosen * signs[start : start + len(chosen)]).sum()
        start += len(chosen)
        for name, module in watched.items():
            tensors = {name: inputs.get(name)}
            if isinstance(module, UnfusedExperts):
                tensors = {f"{name}.gate_up_proj": module.x}
                tensors |= {(f"{name}.down_proj", e): inner for e, inner in module.inner.items()}
            for key, x in tensors.items():
                (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
                _add(totals, key, gradient.flatten(0, -2).double(), getattr(module, "down", ()))
    return totals


def _seen(inputs: dict, name: str, x: torch.Tensor) -> tuple[torch.Tensor]:
    """Of an expert that all tokens share, others use the input too. That of q, k and v is theirs alone."""
    inputs[name] = x if name.endswith("qkv_proj") else x.clone()
    return (inputs[name],)


def _add(totals, key, gradient, experts) -> None:
    name, expert = key if isinstance(key, tuple) else (key, None)
    shape = (gradient.shape[1],) if expert is None else (len(experts), gradient.shape[1])
    into = totals.setdefault(name, Squares(torch.zeros(shape).double(), torch.zeros(shape[:-1]).double()))
    at = () if expert is None else expert
    into.sums[at] += gradient.square().sum(0)
    into.tokens[at] += len(gradient)


def measured(family: str, mode: str | None, signs: torch.Tensor, check=lambda model: None) -> dict[str, Squares]:
    model = support_models.tiny_model(family).eval()
    targets = Targets("all_linear")
    plan = plan_parameters(model, targets)
    control = convert(model, targets, mode) if mode else None
    gradients = InputGradients(model, plan, control)
    batch = make_batch(SAMPLES)
    alone = logprobs(model, batch)
    with gradients.watching() as sums:
        sums.valid = batch.mask.flatten()
        seen = differentiable_logprobs(model, batch)
        gradients.backward((seen * signs).sum())
    assert float((seen.detach() - alone).abs().max()) < 1e-5
    check(model)
    return sums.by_site(torch.device("cpu"))


@pytest.mark.parametrize("mode", [None, "w4a16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "qwen3"])
def test_equal_to_autograd(family, mode):
    signs = SIGNS[2]
    found, wanted = measured(family, mode, signs), expected(family, mode is not None, signs)
    assert found.keys() == wanted.keys()
    for name, of in wanted.items():
        assert found[name].tokens.tolist() == of.tokens.tolist(), name
        torch.testing.assert_close(
            found[name].sums, of.sums, rtol=2e-4, atol=1e-9 + 1e-5 * float(of.sums.max()), msg=name
        )


def test_the_mean_over_signs_is_the_sum_of_the_tokens_squares():
    """Over all signs there are; each token by itself is one sign at a time: a loss of logp_t alone."""
    tokens = [measured("qwen3_moe", None, only) for only in torch.eye(3)]
    draws = [measured("qwen3_moe", None, signs) for signs in SIGNS]
    for name in tokens[0]:
        wanted = sum(t[name].sums for t in tokens)
        mean = sum(d[name].sums for d in draws) / len(draws)
        torch.testing.assert_close(mean, wanted, rtol=1e-3, atol=1e-5 * float(wanted.max()), msg=name)


def test_no_parameter_gets_a_gradient_and_the_old_ones_stay():
    def untouched(model):
        assert all(p.grad is None for p in model.parameters()) and all(p.requires_grad for p in model.parameters())
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert not model.get_input_embeddings()._forward_hooks

    measured("qwen3_moe", "w4a16", SIGNS[1], untouched)
    drawn = torch.get_rng_state()  # by the weights
    support_models.tiny_model("qwen3_moe")
    assert torch.equal(torch.get_rng_state(), drawn)


def test_signs_come_from_their_own_generator():
    before = torch.get_rng_state()
    signs = random_signs(1000, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(signs.tolist()) == {1.0, -1.0} and abs(float(signs.mean())) < 0.1
    assert torch.equal(signs, random_signs(1000, torch.Generator().manual_seed(3)))


def squares(sums, tokens) -> Squares:
    return Squares(torch.tensor(sums, dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64))


def test_means():
    found = means({"a": squares([2.0, 4.0], 2.0), "down": squares([[3.0, 9.0], [0.0, 0.0]], [3.0, 0.0])})
    assert found["a"].tolist() == [1.0, 2.0] and found["a"].dtype == torch.float32
    # Nothing is known of the second expert: the mean of the others, the same for every channel.
    assert found["down"].tolist() == [[1.0, 3.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"b": squares([0.0], 0.0)}, "input of b was seen for 0 tokens instead of 2"),
        ({"b": squares([1.0], 1.0), "c": squares([1.0], 2.0)}, "input of b was seen for 1 tokens instead of 2"),
        ({"b": squares([[0.0]], [0.0])}, "input of b was seen for 0 tokens"),
        ({"b": squares([float("nan")], 2.0)}, "input of b is not finite"),
    ],
)
def test_an_input_without_gradients_is_named(wrong, message):
    with pytest.raises(GradientError, match=message):
        means({"a": squares([2.0, 4.0], 2.0), **wrong})


def test_a_module_that_is_bypassed_is_named():
    """As by a fused kernel: the layer is computed, but not by its module."""
    model = support_models.tiny_model("qwen3").eval()
    gradients = InputGradients(model, plan_parameters(model, Targets("all_linear")))
    down = model.model.layers[1].mlp.down_proj
    batch = make_batch(SAMPLES)
    with gradients.watching() as sums:
        down.forward = lambda x: F.linear(x, down.weight)
        sums.valid = batch.mask.flatten()
        gradients.backward(differentiable_logprobs(model, batch).sum())
        del down.forward
    with pytest.raises(GradientError, match=r"model\.layers\.1\.mlp\.down_proj was seen for 0 tokens"):
        means(sums.by_site(torch.device("cpu")))
