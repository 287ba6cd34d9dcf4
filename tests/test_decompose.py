"""The error decomposition: legs in the trainer's forward, the parts of d, masks from the rollout, routing, cost."""

from __future__ import annotations

import dataclasses
import math
import os

import pytest
import support_engine
import support_models
import torch
import torch.nn.functional as F

from quads_ops.fake_quant import convert
from quads_ops.fp8 import fp8_qdq, row_amax
from quads_ops.matrix_plan import plan_parameters
from quads_ops.nvfp4 import global_scale_dec
from quads_ops.residual import ResidualMask, TokenMask, compensate
from quads_ops.settings import ARMS, QuadsSettings, ResidualSettings, RolloutSettings
from quads_ops.targets import Targets
from quads_ops.weights import fake_quantize_weight, weight_amax
from quads_recipe.analysis import masks, score
from quads_recipe.analysis.cost import Shape, cost
from quads_recipe.analysis.decompose import (
    decompose,
    k3,
    mean_and_error,
    mean_exp_abs,
    nonfinite,
    quantile,
    summarize,
)
from quads_recipe.analysis.emulation import Emulation
from quads_recipe.analysis.layers import LayerErrors, by_kind
from quads_recipe.analysis.legs import Leg, path_of
from quads_recipe.analysis.routing import Routing, flipped
from quads_recipe.analysis.sites import exclusion_units, experts_per_token, find_sites

ALL = Targets("all_linear")
DTYPES = (torch.float32, torch.bfloat16)
FULL = Leg("nvfp4", "nvfp4", compensated=True)


def build(family: str, dtype: torch.dtype = torch.float32, targets: Targets = ALL, **kwargs):
    model = support_models.tiny_model(family, dtype=dtype, **kwargs)
    plan = plan_parameters(model, targets)
    return model, Emulation(model, plan, experts_per_token(model.config))


def samples(rows: int = 4, prompt: int = 6, length: int = 16) -> list[score.Sample]:
    ids = support_models.tiny_batch(rows=rows, length=length).tolist()
    return [score.Sample(tuple(row[:prompt]), tuple(row[prompt : length - 2 * i])) for i, row in enumerate(ids)]


@pytest.fixture
def batch() -> score.Batch:
    return score.make_batch(samples())


# --- legs


@pytest.mark.parametrize("arm", ARMS)
def test_each_step_of_a_path_changes_one_thing(arm):
    path = path_of(QuadsSettings.from_dict({"arm": arm}))
    assert path.weights.activations == path.actor.activations
    assert path.activations.weights == path.weights.weights
    if arm in ("qat", "symmetric", "quads", "quads_full", "bf16"):
        assert path.weights == path.actor
    if arm in ("symmetric", "bf16"):
        assert path.activations == path.actor
    assert path.activations.compensated == (arm in ("quads", "quads_full"))


def test_a_leg_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="weights are one of"):
        Leg("int4")
    with pytest.raises(ValueError, match="only activations in nvfp4"):
        Leg("fp8", "fp8", compensated=True)


# --- the emulated forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", support_models.FAMILIES)
def test_legs_of_the_actor_equal_the_converted_actor_in_every_bit(family, dtype, batch):
    """d_weight = 0 for qat, and d_act = 0 for symmetric, rest on this."""
    model, emulation = build(family, dtype)
    plain = score.logprobs(model, batch)
    emulated = {}
    for leg in (Leg(), Leg("nvfp4"), Leg("nvfp4", "nvfp4")):
        with emulation.running(leg):
            emulated[leg] = score.logprobs(model, batch)
    assert torch.equal(emulated[Leg()], plain)
    control = convert(model, ALL, "w4a16")
    assert torch.equal(score.logprobs(model, batch), emulated[Leg("nvfp4")])
    with control.use_mode("w4a4"):
        assert torch.equal(score.logprobs(model, batch), emulated[Leg("nvfp4", "nvfp4")])
    with emulation.running(Leg("nvfp4", "nvfp4")):  # also on the converted model
        assert torch.equal(score.logprobs(model, batch), emulated[Leg("nvfp4", "nvfp4")])
    assert len({tuple(t.tolist()) for t in emulated.values()}) == 3


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_a_linear_by_hand(kind):
    model, emulation = build("llama")
    q, k, v = (model.get_submodule(f"model.layers.0.self_attn.{p}_proj") for p in "qkv")
    x = torch.randn(2, 5, 64)
    keep = ResidualMask(blocks=torch.tensor([True, False, False, True]))
    residuals = masks.uniform(emulation.sites, None) | {"model.layers.0.self_attn.qkv_proj": keep}
    if kind == "nvfp4":
        g = global_scale_dec(torch.stack([weight_amax(m.weight) for m in (q, k, v)]).amax())
        weight = fake_quantize_weight(v.weight.detach(), g)
        values = compensate(x.flatten(0, 1), "w4a4", keep)
    else:
        weight = fp8_qdq(v.weight.detach(), row_amax(v.weight.detach()))
        values = fp8_qdq(x, row_amax(x)).flatten(0, 1)
    with emulation.running(Leg(kind, kind, compensated=kind == "nvfp4"), residuals), torch.no_grad():
        got = v(x)
    assert torch.equal(got, F.linear(values.view(x.shape), weight))


def test_experts_by_hand_with_a_mask_per_expert():
    model, emulation = build("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    name = "model.layers.1.mlp.experts"
    x = torch.randn(7, 64)
    index = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0], [1, 2], [2, 0]])
    weights = torch.rand(7, 2)
    keep = torch.tensor([[True, False], [False, True], [True, True], [False, False]])
    residuals = masks.uniform(emulation.sites, "all")
    residuals[f"{name}.down_proj"] = masks.ExpertMasks(keep)
    with emulation.running(FULL, residuals), torch.no_grad():
        got = experts(x, index, weights)
    gate_up, down = (
        fake_quantize_weight(w.detach(), global_scale_dec(weight_amax(w)))
        for w in (experts.gate_up_proj, experts.down_proj)
    )
    expected = torch.zeros_like(x)
    rounded = compensate(x, "w4a4", "all")
    for token in range(7):
        for slot in range(2):
            e = int(index[token, slot])
            gate, up = (rounded[token : token + 1] @ gate_up[e].t()).chunk(2, -1)
            inner = compensate(F.silu(gate) * up, "w4a4", ResidualMask(blocks=keep[e]))
            expected[token] += weights[token, slot] * (inner @ down[e].t())[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    with emulation.running(FULL, masks.uniform(emulation.sites, "all")), torch.no_grad():
        assert not torch.allclose(got, experts(x, index, weights), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_a_spared_site_keeps_its_activations(family, batch):
    model, emulation = build(family)
    with emulation.running(Leg("nvfp4")):
        unquantized = score.logprobs(model, batch)
    with emulation.running(Leg("nvfp4", "nvfp4"), spared=frozenset(emulation.sites)):
        all_spared = score.logprobs(model, batch)
    # The experts run one by one here, in another order of sums.
    torch.testing.assert_close(all_spared, unquantized, rtol=0, atol=1e-5)
    one = frozenset(["model.layers.0.self_attn.qkv_proj"])
    with emulation.running(Leg("nvfp4", "nvfp4"), spared=one):
        assert not torch.equal(score.logprobs(model, batch), unquantized)


def test_nothing_is_left_behind(batch):
    model, emulation = build("qwen2_moe")
    before = score.logprobs(model, batch)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    with emulation.running(Leg("nvfp4", "nvfp4")):
        score.logprobs(model, batch)
        with pytest.raises(RuntimeError, match="running already"), emulation.running(Leg()):
            pass
    with pytest.raises(ZeroDivisionError), emulation.running(Leg("fp8", "fp8")):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    assert torch.equal(score.logprobs(model, batch), before)


def test_a_compensated_leg_needs_a_residual_everywhere():
    _, emulation = build("qwen3")
    with pytest.raises(masks.MaskError, match="no residual mask for model.layers.0.self_attn.o_proj"):
        residuals = masks.uniform([s for s in emulation.sites if "0.self_attn.o" not in s], "all")
        with emulation.running(FULL, residuals):
            pass


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_padding_and_batching_change_nothing(family):
    model, emulation = build(family)
    residuals = masks.uniform(emulation.sites, "all")
    with emulation.running(FULL, residuals):
        together = score.logprobs(model, score.make_batch(samples()))
        alone = torch.cat([score.logprobs(model, score.make_batch([s])) for s in samples()])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)
    limited = list(score.batches(samples(), vocab_size=1 << 22))
    assert [len(b.samples) for b in limited] == [2, 2]
    assert [s for b in limited for s in b.samples] == samples()


def test_response_tokens_are_scored_by_their_own_position():
    model, _ = build("llama")
    sample = samples(rows=1)[0]
    ids = torch.tensor([[*sample.prompt, *sample.response]])
    with torch.no_grad():
        table = model(ids).logits[0].log_softmax(-1)
    expected = [table[len(sample.prompt) - 1 + i, token] for i, token in enumerate(sample.response)]
    torch.testing.assert_close(score.logprobs(model, score.make_batch([sample])), torch.stack(expected).double())


# --- the parts


def parts_of(seed: int = 0, tokens: int = 500):
    generator = torch.Generator().manual_seed(seed)
    actor = -torch.rand(tokens, generator=generator) * 8
    steps = [scale * torch.randn(tokens, generator=generator) for scale in (0.1, 0.05, 1e-6)]
    weights, activations = actor + steps[0], actor + steps[0] + steps[1]
    return decompose(activations + steps[2], actor, weights, activations)


def test_the_parts_add_up():
    parts = parts_of()
    assert parts.error() <= 1e-6
    torch.testing.assert_close(parts.d, parts.weight + parts.act + parts.num, rtol=0, atol=1e-14)
    summary = summarize(parts)
    assert sum(summary[name].share for name in ("weight", "act", "num")) == pytest.approx(1, abs=1e-9)
    assert summary["weight"].share == pytest.approx(0.8, abs=0.05)  # 0.01 of 0.0125
    assert summary["d"].share == pytest.approx(1)
    assert summary["weight"].mean == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=0.1)


def test_an_error_in_one_part_shows_in_the_sum():
    parts = parts_of()
    wrong = dataclasses.replace(parts, act=parts.act + 1e-3)
    assert wrong.error() > 9e-4


def test_shapes_must_agree_and_nonfinite_tokens_are_counted_apart():
    with pytest.raises(ValueError, match="one shape"):
        decompose(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(3))
    parts = decompose(torch.tensor([0.0, float("nan"), 1.0]), torch.zeros(3), torch.zeros(3), torch.zeros(3))
    assert nonfinite(parts) == 1
    assert summarize(parts)["d"].mean == 0.5
    with pytest.raises(ValueError, match="no token"):
        summarize(decompose(*[torch.full((2,), float("nan"))] * 4))


def test_no_share_where_nothing_varies():
    summary = summarize(decompose(*[torch.zeros(4)] * 4))
    assert summary["d"].share is None and summary["weight"].max == 0


def test_the_standard_error_counts_sequences():
    """Against the spread of the mean over many draws, with tokens of one sequence strongly alike."""
    generator = torch.Generator().manual_seed(0)
    sequence = torch.arange(20).repeat_interleave(10)
    means, errors = [], []
    for _ in range(400):
        common = torch.randn(20, generator=generator, dtype=torch.float64)
        values = common.repeat_interleave(10) + 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
        mean, error = mean_and_error(values, sequence)
        means.append(mean)
        errors.append(error)
    assert sum(errors) / len(errors) == pytest.approx(torch.tensor(means).std().item(), rel=0.1)
    assert math.isnan(mean_and_error(torch.zeros(3), torch.zeros(3, dtype=torch.int64))[1])


def test_summaries_of_d():
    values = torch.arange(1, 101, dtype=torch.float64)
    assert quantile(values, 0.99) == 99 and quantile(values, 0) == 1 and quantile(values, 1) == 100
    assert mean_exp_abs(torch.tensor([0.0, -math.log(3)])) == pytest.approx(2)
    assert k3(torch.zeros(3)) == 0
    assert k3(torch.tensor([math.log(2)])) == pytest.approx(0.5 - 1 + math.log(2))


# --- sites


def test_sites_join_what_the_rollout_joins():
    model, emulation = build("qwen2_moe", num_hidden_layers=1)
    layer = model.model.layers[0]
    q, k, v, o = (layer.self_attn.get_submodule(f"{p}_proj").weight for p in "qkvo")
    shared, experts = layer.mlp.shared_expert, layer.mlp.experts
    rows = {
        "self_attn.qkv_proj": ("attention qkv", torch.cat([q, k, v])),
        "self_attn.o_proj": ("attention out", o),
        "mlp.experts.gate_up_proj": ("experts gate+up", experts.gate_up_proj),
        "mlp.experts.down_proj": ("experts down", experts.down_proj),
        "mlp.shared_expert.gate_up_proj": (
            "shared expert gate+up",
            torch.cat([shared.gate_proj.weight, shared.up_proj.weight]),
        ),
        "mlp.shared_expert.down_proj": ("shared expert down", shared.down_proj.weight),
    }
    assert {name: (s.kind, s.elements, s.n, s.k) for name, s in emulation.sites.items()} == {
        f"model.layers.0.{name}": (kind, w.numel(), *w.shape[-2:]) for name, (kind, w) in rows.items()
    }
    assert {s.layer for s in emulation.sites.values()} == {0}
    units = exclusion_units(emulation.sites)
    assert units["model.layers.0.mlp.experts"] == tuple(s for s in emulation.sites if ".experts." in s)
    assert emulation.sites["model.layers.0.mlp.experts.down_proj"].flops == 2 * 32 * 64 * 2  # two experts a token
    only = find_sites(plan_parameters(model, Targets("experts")), 2)
    assert all(".experts." in name for name in only)


# --- masks from the rollout


def entry(**changes) -> dict:
    base = {"module": "m.o_proj", "stem": "weight", "residual": "mask", "ratio": 0.5, "granularity": "block",
            "first": 0, "columns": 64, "k": 64, "experts": None, "mask": bytes([1, 0, 0, 1])}  # fmt: skip
    return base | changes


def test_masks_of_one_worker():
    found = masks.from_rollout(
        [[
            entry(), entry(module="n", residual="none", mask=None), entry(module="a", residual="all", mask=None),
            entry(module="t", residual="token", ratio=0.25, granularity="channel", mask=None),
            entry(module="x.experts", stem="w2", k=32, columns=32, experts=[0, 1], mask=bytes([1, 0, 0, 1])),
            entry(module="x.experts", stem="w13"),
        ]]
    )  # fmt: skip
    assert found["m.o_proj"].blocks.tolist() == [True, False, False, True]
    assert found["n"] is None and found["a"] == "all" and found["t"] == TokenMask(0.25, "channel")
    assert found["x.experts.down_proj"].keep.tolist() == [[True, False], [False, True]]
    assert found["x.experts.down_proj"].of(1).blocks.tolist() == [False, True]
    assert "x.experts.gate_up_proj" in found


def test_masks_of_several_workers_are_put_together():
    split_k = [[entry(first=0, columns=32, mask=b"\1\0")], [entry(first=32, columns=32, mask=b"\0\1")]]
    assert masks.from_rollout(split_k)["m.o_proj"].blocks.tolist() == [True, False, False, True]
    same = [[entry()], [entry()]]
    assert masks.from_rollout(same)["m.o_proj"].blocks.tolist() == [True, False, False, True]
    some = {"module": "x.experts", "stem": "w2", "k": 32, "columns": 32}
    experts = [[entry(**some, experts=[1], mask=b"\1\0")], [entry(**some, experts=[0], mask=b"\0\1")]]
    assert masks.from_rollout(experts)["x.experts.down_proj"].keep.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([[entry(first=0, columns=32, mask=b"\1\0")]], "only a part of its mask of K = 64"),
        ([[entry()], [entry(mask=bytes([0, 0, 1, 1]))]], "different masks of the same input"),
        ([[entry()], [entry(residual="all", mask=None)]], "disagree about its residual: all, mask"),
        ([[entry(module="x", stem="w2", k=32, columns=32, experts=[1], mask=b"\1\0")]], r"experts \[1\] only"),
    ],
)
def test_masks_that_do_not_fit_are_refused(workers, message):
    with pytest.raises(masks.MaskError, match=message):
        masks.from_rollout(workers)


# --- layers


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_layer_errors_fall_with_the_ratio_and_ignore_padding(family):
    model, emulation = build(family)
    half = {s: TokenMask(0.5) for s in emulation.sites}
    residuals = {0.0: masks.uniform(emulation.sites, None), 0.5: half, 1.0: masks.uniform(emulation.sites, "all")}
    totals = []
    for groups in ([samples()], [[s] for s in samples()]):  # padded, and not
        errors = LayerErrors(residuals)
        with emulation.running(Leg("nvfp4"), observer=errors):
            for group in groups:
                padded = score.make_batch(group)
                errors.valid = padded.mask.flatten()
                score.logprobs(model, padded)
        totals.append(errors.by_site)
    assert set(totals[0]) == set(emulation.sites)
    for name, site in totals[0].items():
        assert site.activation_error(0.0) > site.activation_error(0.5) > site.activation_error(1.0) > 0
        assert 0.02 < site.weight_error < 0.3 and 0 < site.fp8_error < site.weight_error
        assert site.energy_covered(0.0) == 0 and site.energy_covered(1.0) == 1
        assert 0.5 < site.energy_covered(0.5) < 1 and 0.9 < site.energy_removed(1.0) < 1
        assert site.activation_error(1.0) == pytest.approx(totals[1][name].activation_error(1.0), rel=1e-3)
        assert site.rows == totals[1][name].rows
    tokens = sum(map(len, samples()))
    assert totals[0]["model.layers.0.self_attn.qkv_proj"].rows == tokens
    kinds = by_kind(totals[0])
    assert kinds["attention qkv"].rows == 2 * tokens
    if family == "qwen3_moe":
        assert kinds["experts down"].rows == 2 * 2 * tokens  # two layers, two experts each


def test_a_frozen_mask_covers_the_energy_it_selects():
    model, emulation = build("qwen3", num_hidden_layers=1)
    first = ResidualMask(blocks=torch.tensor([True, False, False, False]))
    rest = ResidualMask(blocks=~first.blocks)
    name = "model.layers.0.self_attn.qkv_proj"
    residuals = [masks.uniform(emulation.sites, None) | {name: mask} for mask in (first, rest)]
    errors = LayerErrors(dict(enumerate(residuals)))
    batch = score.make_batch(samples())
    errors.valid = batch.mask.flatten()
    with emulation.running(Leg("nvfp4"), observer=errors):
        score.logprobs(model, batch)
    site = errors.by_site[name]
    assert site.energy_covered(0) + site.energy_covered(1) == pytest.approx(1, abs=1e-6)
    assert 0 < site.energy_removed(0) <= site.energy_covered(0)


# --- routing


@pytest.mark.parametrize("family", support_models.MOE_FAMILIES)
def test_replaying_its_own_experts_changes_nothing(family, batch):
    model, _ = build(family)
    convert(model, ALL, "w4a16")
    routing = Routing(model)
    assert len(routing.routers) == model.config.num_hidden_layers
    with routing.recorded() as choices:
        plain = score.logprobs(model, batch)
    with routing.replayed(choices):
        torch.testing.assert_close(score.logprobs(model, batch), plain, rtol=0, atol=1e-6)
    others = {name: (chosen + 1) % 4 for name, chosen in choices.items()}
    with routing.replayed(others):
        assert not torch.allclose(score.logprobs(model, batch), plain, atol=1e-3)
    assert torch.equal(score.logprobs(model, batch), plain)
    changed = flipped(choices, others)
    assert changed.shape == (batch.ids.numel(), len(choices))
    assert not flipped(choices, choices).any()
    assert not flipped(choices, {name: chosen.flip(-1) for name, chosen in choices.items()}).any()


def test_a_dense_model_has_no_routing():
    model, _ = build("llama")
    assert not Routing(model).routers
    assert flipped({}, {}).shape == (0, 0)


# --- cost


def test_cost_of_a_model_that_is_all_sites():
    _, emulation = build("qwen3")
    shape = Shape(emulation.sites, 0, 0)

    def of(mode: str, ratio: float = 0.0, **residual):
        return cost(shape, RolloutSettings(mode=mode, residual=ResidualSettings(ratio=ratio, **residual)))

    assert of("bf16").products == 1 and of("bf16").weights == 1
    assert of("fp8").products == 0.5 and of("fp8").weights == 0.5
    assert of("w4a16").products == 1 and of("w4a16").weights == pytest.approx(4.5 / 16)
    assert of("w4a4").products == 0.25 and of("w4a4", 0.5).products == 0.375 and of("w4a4", 1.0).products == 0.5
    assert of("w4a4", 0.5).residual == 0.125
    # Masks of single channels, or per token, save nothing.
    assert of("w4a4", 0.5, granularity="channel").products == of("w4a4", 0.5, scope="token").products == 0.5
    every = cost(shape, RolloutSettings(mode="w4a4"), list(emulation.sites))
    assert every.products == 1 and every.residual == 0


# --- under FSDP, as the probe in training uses it


def job_fsdp(folder) -> dict:
    """Legs on the engine of the actor: against its own forward, and without a trace in training."""
    path = support_models.save_checkpoint(folder / f"model{os.environ['RANK']}", "qwen3_moe")
    engines = [
        support_engine.build_engine(path, quads={"arm": "quads"}, param_dtype=os.environ["PARAM_DTYPE"],
                                    strategy=os.environ["STRATEGY"]) for _ in range(2)
    ]  # fmt: skip
    data = support_engine.batch()
    probed, other = engines
    model = support_models.tiny_model("qwen3_moe")
    emulation = Emulation(probed.module, plan_parameters(model, ALL), 2)
    actor = support_engine.logprobs(probed, data)
    with probed.unquantized(), emulation.running(Leg("nvfp4")):
        weights = support_engine.logprobs(probed, data)
    with probed.unquantized(), emulation.running(FULL, masks.uniform(emulation.sites, "all")):
        compensated = support_engine.logprobs(probed, data)
    norms = [support_engine.train_step(engine, data) for engine in (probed, other)]
    after = [support_engine.logprobs(engine, data) for engine in (probed, other)]
    return {"actor": actor, "weights": weights, "compensated": compensated, "norms": norms, "after": after}


@pytest.mark.integration
@pytest.mark.parametrize(("strategy", "dtype"), [("fsdp2", "bf16"), ("fsdp", "fp32")])
def test_legs_run_on_the_fsdp_actor_and_leave_no_trace(tmp_path, strategy, dtype):
    [got] = support_engine.run_ranks("test_decompose:job_fsdp", 1, tmp_path, STRATEGY=strategy, PARAM_DTYPE=dtype)
    assert torch.equal(got["actor"], got["weights"])
    assert not torch.equal(got["actor"], got["compensated"])
    assert got["norms"][0] == got["norms"][1]
    assert torch.equal(*got["after"])
    assert not torch.equal(got["after"][0], got["actor"])
