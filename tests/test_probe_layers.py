"""The probe of layers: what it measures, that it leaves no trace in training, and where it writes."""

from __future__ import annotations

import csv
import os
from types import SimpleNamespace

import pytest
import support_engine
import support_models
import torch

from quads_ops import nvfp4
from quads_ops.matrix_plan import plan_parameters
from quads_ops.residual import ResidualMask, compensate
from quads_ops.settings import QuadsSettings
from quads_ops.targets import Targets
from quads_recipe import probe_layers
from quads_recipe.analysis import masks, score
from quads_recipe.analysis.emulation import Emulation, Product
from quads_recipe.analysis.layers import LayerErrors, SiteErrors, by_kind, merge
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.sites import Site, find_sites

SITE = Site("model.layers.3.self_attn.o_proj", ("w",), ("model.layers.3.self_attn.o_proj",), 64, 48)


def product(rows: int = 40, seed: int = 0) -> Product:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    g = nvfp4.global_scale_dec(weight.abs().amax())
    return Product(SITE, "w", None, x, None, weight, nvfp4.qdq(weight, g).bfloat16())


def measure(seen: Product, residual, *, fp8: bool = True) -> SiteErrors:
    errors = LayerErrors({0.0: {SITE.name: None}, 1.0: {SITE.name: residual}}, fp8=fp8)
    errors.valid = torch.ones(len(seen.x), dtype=torch.bool)
    errors.product(seen)
    return errors.by_site[SITE.name]


# --- the errors


def test_errors_by_hand_in_fp64():
    seen = product()
    got = measure(seen, "all")
    x, weight, quantized = seen.x.double(), seen.weight.double(), seen.quantized.double()
    rounded = {r: compensate(seen.x, "w4a4", of).double() for r, of in ((0.0, None), (1.0, "all"))}
    expected = (x @ (quantized - weight).T).norm() / (x @ weight.T).norm()
    assert got.weight_error == pytest.approx(expected.item(), rel=1e-5)
    for ratio, values in rounded.items():
        expected = ((values - x) @ quantized.T).norm() / (x @ quantized.T).norm()
        assert got.activation_error(ratio) == pytest.approx(expected.item(), rel=1e-5)
    assert got.energy == pytest.approx((x - rounded[0.0]).square().sum().item(), rel=1e-6)
    assert 0.9 < got.energy_removed(1.0) < 1 and got.energy_covered(1.0) == 1


@pytest.mark.parametrize("residual", ["all", ResidualMask(blocks=torch.tensor([True, False, True, False]))], ids=type)
def test_autocast_of_the_forward_does_not_round_the_errors(residual):
    """verl's forward runs under autocast to bf16, whose rounding is as large as what ratio 1 leaves over."""
    seen = product()
    alone = measure(seen, residual)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (seen.x.float() @ seen.x.float().T).dtype == torch.bfloat16
        within = measure(seen, residual)
    assert within == alone


def test_without_fp8_nothing_else_changes():
    with_it, without = measure(product(), "all"), measure(product(), "all", fp8=False)
    assert with_it.fp8 > 0 and without.fp8 == 0
    with_it.fp8 = 0.0
    assert with_it == without


def test_ranks_and_kinds_add_up():
    seen = product()
    whole = measure(seen, "all")
    parts = [
        measure(Product(SITE, "w", None, rows, None, seen.weight, seen.quantized), "all")
        for rows in seen.x.split([13, 27])
    ]
    merged = merge([{SITE.name: parts[0]}, {}, {SITE.name: parts[1]}])[SITE.name]
    assert merged.rows == 40
    for name in ("activation_error", "energy_covered", "energy_removed"):
        assert getattr(merged, name)(1.0) == pytest.approx(getattr(whole, name)(1.0), rel=1e-6)
    assert merged.fp8_error == pytest.approx(whole.fp8_error, rel=1e-6)
    assert parts[0].rows == 13  # what was merged is not changed
    assert by_kind({"a": parts[0], "b": parts[1]})["attention out"].rows == 40


# --- which tokens count


def inputs(mask=None, tokens: int = 6) -> dict:
    return {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), "attention_mask": mask}


def test_padding_of_a_padded_batch():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert probe_layers.valid_tokens(inputs(mask), 0, 0, 1).tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize(
    ("rank", "size", "pad", "valid"), [(0, 1, 0, 6), (0, 1, 2, 4), (0, 2, 3, 6), (1, 2, 3, 3), (1, 3, 8, 4)]
)
def test_padding_of_packed_tokens_is_at_the_end_of_the_last_ranks(rank, size, pad, valid):
    got = probe_layers.valid_tokens(inputs(), pad, rank, size)
    assert got.tolist() == [True] * valid + [False] * (6 - valid)


# --- on the FSDP actor


def reported(sites: dict[str, Site]) -> list[list[dict]]:
    """What a worker of the rollout reports: a mask for each site, one per expert before the down projections."""
    entries = []
    for site in sites.values():
        down = site.experts and site.name.endswith(".down_proj")
        keep = [(torch.arange(site.k // 16) + expert) % 2 == 0 for expert in range(site.experts if down else 1)]
        stem = ("w2" if down else "w13") if site.experts else "weight"
        entries.append({
            "module": site.modules[0] if site.experts else site.name, "stem": stem, "residual": "mask", "ratio": 0.5,
            "granularity": "block", "first": 0, "columns": site.k, "k": site.k,
            "experts": list(range(site.experts)) if down else None, "mask": bytes(torch.cat(keep).tolist()),
        })  # fmt: skip
    return [entries]


def job_fsdp(folder) -> dict:
    """Layers measured on this rank's batch, and training after it, against an engine that was not measured."""
    rank = int(os.environ["RANK"])
    path = support_models.save_checkpoint(folder / f"model{rank}", "qwen3_moe")
    probed, other = (
        support_engine.build_engine(path, quads={"arm": "quads"}, param_dtype=os.environ["PARAM_DTYPE"],
                                    strategy=os.environ["STRATEGY"]) for _ in range(2)
    )  # fmt: skip
    from quads_recipe.probe import LAYERS, ProbeForwards

    data = support_engine.batch(seed=rank)
    forwards = ProbeForwards(probed)
    forwards.set_masks(reported(find_sites(probed.plan)))
    before = [p.detach().clone() for p in probed.module.parameters()]
    rng, hook = torch.get_rng_state(), probed.prepare_model_inputs
    with forwards.leg(LAYERS):
        support_engine.logprobs(probed, data)
    kept = {
        "rng": torch.equal(torch.get_rng_state(), rng),
        "inputs": probed.prepare_model_inputs == hook,
        "gradients": all(p.grad is None for p in probed.module.parameters()),
        "parameters": all(map(_equal, before, probed.module.parameters())),
    }
    layers = forwards.take_layers()
    norms = [support_engine.train_step(engine, data) for engine in (probed, other)]
    after = [support_engine.logprobs(engine, data) for engine in (probed, other)]
    return {"layers": layers, "kept": kept, "norms": norms, "after": after, "again": forwards.take_layers()}


def _equal(a, b) -> bool:
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.integration
@pytest.mark.parametrize(("strategy", "dtype", "ranks"), [("fsdp2", "fp32", 2), ("fsdp", "bf16", 1)])
def test_layers_are_measured_on_the_actor_and_leave_no_trace(tmp_path, strategy, dtype, ranks):
    job = "test_probe_layers:job_fsdp"
    results = support_engine.run_ranks(job, ranks, tmp_path, STRATEGY=strategy, PARAM_DTYPE=dtype)
    for got in results:
        assert all(got["kept"].values()), got["kept"]
        assert got["norms"][0] == got["norms"][1]
        assert torch.equal(*got["after"])
        assert got["again"] == {}
    merged = merge(got["layers"] for got in results)
    expected = _directly(ranks)
    assert set(merged) == set(expected)
    for name, errors in merged.items():
        of = expected[name]
        assert errors.rows == of.rows, "padding counted, or tokens were lost"
        assert 0.2 < errors.energy_covered(0.5) < 0.8
        assert errors.activation_error(0.5) < 0.9 * errors.activation_error(0.0)
        # In bf16 later layers get other inputs, and other tokens for an expert.
        if dtype == "fp32" or name == "model.layers.0.self_attn.qkv_proj":
            close = 1e-4 if dtype == "fp32" else 0.05
            assert errors.weight_error == pytest.approx(of.weight_error, rel=close)
            assert errors.activation_error(0.0) == pytest.approx(of.activation_error(0.0), rel=close)
            assert errors.activation_error(0.5) == pytest.approx(of.activation_error(0.5), rel=close)
            assert errors.energy_covered(0.5) == pytest.approx(of.energy_covered(0.5), rel=close)


def _directly(ranks: int) -> dict[str, SiteErrors]:
    """The same tokens through the plain model in FP32, sequence by sequence, without FSDP, padding and verl."""
    model = support_models.tiny_model("qwen3_moe")
    emulation = Emulation(model, plan_parameters(model, Targets("all_linear")), 2)
    masked = masks.from_rollout(reported(emulation.sites))
    errors = LayerErrors({0.0: masks.uniform(emulation.sites, None), 0.5: masked}, fp8=False)
    with emulation.running(Leg("nvfp4"), observer=errors):
        for rank in range(ranks):
            for ids in support_engine.batch(seed=rank)["input_ids"].unbind():
                one = score.make_batch([score.Sample(tuple(ids[:2].tolist()), tuple(ids[2:].tolist()))])
                errors.valid = one.mask.flatten()
                score.logprobs(model, one)
    return errors.by_site


# --- what becomes of it


def rollout(arm: str):
    return QuadsSettings.from_dict({"arm": arm}).rollout


def sites(ratio: float) -> dict[str, SiteErrors]:
    found = {}
    for layer in (0, 1):
        for owner, last in (("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp.experts", "down_proj")):
            name = f"model.layers.{layer}.{owner}.{last}"
            errors = SiteErrors(Site(name, ("w",), (name,), 64, 48), output=4.0, exact=4.0, weights=0.04, fp8=0.01,
                                energy=2.0, rows=7)  # fmt: skip
            for key, error, covered, left in ((0.0, 0.16, 0.0, 2.0), (ratio, 0.01, 1.2, 0.3)):
                errors.error[key], errors.covered[key], errors.left[key] = error, covered, left
            found[name] = errors
    return found


def test_metrics_by_kind_of_layer():
    found = probe_layers.metrics(sites(0.5), rollout("quads"))
    of = "quads/layers_experts_down_"
    assert {name: value for name, value in found.items() if name.startswith(of)} == pytest.approx(
        {f"{of}weight_error_mean": 0.1, f"{of}act_error_without_rac_mean": 0.2, f"{of}act_error_mean": 0.05,
         f"{of}energy_covered_mean": 0.6}
    )  # fmt: skip
    assert {name.split("_error")[0] for name in found if name.endswith("_act_error_mean")} == {
        f"quads/layers_{kind}_act" for kind in ("attention_qkv", "attention_out", "experts_down")
    }
    fp8 = probe_layers.metrics(sites(0.0), rollout("fp8"))
    assert fp8["quads/layers_attention_qkv_fp8_error_mean"] == pytest.approx(0.05)
    assert not [name for name in fp8 if "act_error" in name or "energy" in name]


def test_the_table_grows_by_a_row_per_site_and_probe(tmp_path):
    for step in (3, 6):
        file = probe_layers.append(tmp_path / "new", step, sites(0.5), rollout("quads"))
    rows = list(csv.DictReader(file.open()))
    assert file.name == "quads_layers.csv" and [row["step"] for row in rows] == ["3"] * 6 + ["6"] * 6
    assert rows[0] == {
        "step": "3", "site": "model.layers.0.self_attn.qkv_proj", "kind": "attention qkv", "layer": "0", "tokens": "7",
        "weight_error": "0.1", "fp8_error": "", "ratio": "0.5", "act_error_without_rac": "0.2", "act_error": "0.05",
        "energy_covered": "0.6", "energy_removed": "0.85",
    }  # fmt: skip


def test_the_trainers_side_asks_every_rank_and_merges(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from quads_recipe import probe

    asked = []
    ranks = [sites(0.5), sites(0.5)]
    group = SimpleNamespace(
        compute_leg_log_prob=lambda part: asked.append(part.extra_info[probe.LEG_FIELD]), take_layers=lambda: ranks
    )
    settings = QuadsSettings.from_dict({"arm": "quads", "probe": {"every": 1, "layers": True}})
    found = probe.run_layers(group, SimpleNamespace(extra_info={}), settings, 4, tmp_path)
    assert asked == [probe.LAYERS]
    assert found["quads/layers_experts_down_act_error_mean"] == pytest.approx(0.05)
    assert found["quads/layers_seconds_max"] > 0
    rows = list(csv.DictReader((tmp_path / probe_layers.FILE).open()))
    assert {row["tokens"] for row in rows} == {"14"}


def test_layers_only_where_asked_for_and_quantized(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from quads_recipe import probe

    on = {"every": 1, "layers": True}
    assert probe.measures_layers(QuadsSettings.from_dict({"arm": "fp8", "probe": on}))
    assert not probe.measures_layers(QuadsSettings.from_dict({"arm": "bf16", "probe": on}))
    assert not probe.measures_layers(QuadsSettings.from_dict({"arm": "quads", "probe": {"every": 1}}))
