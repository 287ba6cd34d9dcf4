"""The trainer's measurement of gradients: what it finds under FSDP, and that it leaves no trace in training."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import support_engine
import support_models
import torch

from quads_ops.fake_quant import convert
from quads_ops.matrix_plan import plan_parameters
from quads_ops.settings import QuadsSettings
from quads_ops.targets import Targets
from quads_recipe.analysis.gradients import InputGradients, means, random_signs
from quads_recipe.analysis.score import Sample, differentiable_logprobs, make_batch

BLOCK = {"arm": "quads", "rollout": {"residual": {"score": "sensitivity"}}, "sensitivity": {"ema": 0.75}}
PROMPT = 3
ROUNDS = 2


def batch(rank: int):
    """As support_engine's, with the mask of the responses; one token of each is masked."""
    data = support_engine.batch(seed=rank)
    masks = []
    for ids in data["input_ids"].unbind():
        mask = torch.ones(len(ids) - PROMPT, dtype=torch.int64)
        mask[1] = 0
        masks.append(mask)
    data["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    return data


def job(folder) -> dict:
    """Gradients measured on this rank's batch, and training after it, against an engine that was not measured."""
    rank = int(os.environ["RANK"])
    path = support_models.save_checkpoint(folder / f"model{rank}", "qwen3_moe")
    measured, other = (
        support_engine.build_engine(
            path, quads=BLOCK, param_dtype=os.environ["PARAM_DTYPE"], strategy=os.environ["STRATEGY"],
            gradient_checkpointing=os.environ["CHECKPOINTING"] == "1",
        ) for _ in range(2)
    )  # fmt: skip
    from quads_recipe.sensitivity import Sensitivity

    data = batch(rank)
    sensitivity = Sensitivity(measured)
    metrics, found = [], []
    for _ in range(ROUNDS):
        with sensitivity.measuring():
            support_engine.logprobs(measured, data)
        metrics.append(sensitivity.update())
        found.append(dict(measured.sensitivities))
    norms = [[support_engine.train_step(engine, data)] for engine in (measured, other)]
    kept = _again(measured, sensitivity, data)
    for engine, of in zip((measured, other), norms, strict=True):
        of.append(support_engine.train_step(engine, data))
    after = [support_engine.logprobs(engine, data) for engine in (measured, other)]
    sent = [(name, tensor.clone()) for name, tensor in measured.get_per_tensor_param()[0]]
    return {"kept": kept, "norms": norms, "after": after, "metrics": metrics, "found": found, "sent": sent}


def _again(engine, sensitivity, data) -> dict[str, bool]:
    """What a measurement between two steps must leave as it was, gradients included."""
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    before = [(p.detach().clone(), p.grad.detach().clone()) for p in parameters]
    rng, attributes = torch.get_rng_state(), set(vars(engine))
    with sensitivity.measuring():
        support_engine.logprobs(engine, data)
    return {
        "rng": torch.equal(torch.get_rng_state(), rng),
        "engine": set(vars(engine)) == attributes,
        "training": not any(module.training for module in engine.module.modules()),
        "requires_grad": all(p.requires_grad for p in parameters),
        "parameters": all(_equal(p, old) for p, (old, _) in zip(parameters, before, strict=True)),
        "gradients": all(_equal(p.grad, old) for p, (_, old) in zip(parameters, before, strict=True)),
    }


def _equal(a, b) -> bool:
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
    return torch.equal(a, b)


RUNS = [
    ("fsdp2", "fp32", "0", 2), ("fsdp2", "bf16", "1", 2), ("fsdp2", "bf16", "0", 1),
    ("fsdp", "fp32", "1", 2), ("fsdp", "bf16", "0", 2), ("fsdp", "fp32", "0", 1),
]  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize(("strategy", "dtype", "checkpointing", "ranks"), RUNS)
def test_gradients_of_the_actor_leave_no_trace(tmp_path, strategy, dtype, checkpointing, ranks):
    results = support_engine.run_ranks(
        "test_sensitivity:job", ranks, tmp_path, STRATEGY=strategy, PARAM_DTYPE=dtype, CHECKPOINTING=checkpointing
    )
    for got in results:
        assert all(got["kept"].values()), got["kept"]
        assert got["norms"][0] == got["norms"][1]
        assert torch.equal(*got["after"])
        vectors = got["found"][-1]
        names = [name for name, _ in got["sent"]]
        assert names[: len(vectors)] == [f"quads.sensitivity:{name}" for name in vectors]
        assert not any(name.startswith("quads.") for name in names[len(vectors) :])
        for (_, sent), (name, vector) in zip(got["sent"], vectors.items(), strict=False):
            assert sent.dtype == torch.float32 and torch.equal(sent, vector)
            assert torch.equal(vector, results[0]["found"][-1][name]), "ranks disagree"
    expected, tokens = _directly(ranks)
    got = results[0]
    assert [m["quads/sensitivity_tokens_max"] for m in got["metrics"]] == [tokens] * ROUNDS
    if dtype == "bf16":
        assert got["found"][-1].keys() == expected[-1].keys()
        return  # in bf16 later layers get other inputs, and other tokens for an expert
    for found, wanted in zip(got["found"], expected, strict=True):
        for name, vector in wanted.items():
            close = dict(rtol=2e-3, atol=1e-4 * float(vector.max()))
            torch.testing.assert_close(found[name], vector, msg=f"{name}: {found[name]} {vector}", **close)


def _directly(ranks: int) -> tuple[list[dict[str, torch.Tensor]], int]:
    """The moving averages, from the plain model without FSDP, padding and verl; and the tokens of one round."""
    model, targets = support_models.tiny_model("qwen3_moe"), Targets("all_linear")
    plan = plan_parameters(model, targets)
    gradients = InputGradients(model, plan, convert(model, targets, "w4a16"))
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    averages: list[dict[str, torch.Tensor]] = []
    for _ in range(ROUNDS):
        with gradients.watching() as sums:
            for rank, generator in enumerate(generators):
                _backward(model, gradients, sums, batch(rank), generator)
        new = means(sums.by_site(torch.device("cpu")))
        old = averages[-1] if averages else new
        averages.append({name: 0.75 * old[name] + 0.25 * vector for name, vector in new.items()})
    return averages, sum(len(ids) for rank in range(ranks) for ids in batch(rank)["input_ids"].unbind())


def _backward(model, gradients, sums, data, generator) -> None:
    """Two sequences at a time, as the engine's micro batches are."""
    ids, masks = data["input_ids"].unbind(), data["response_mask"].unbind()
    for first in range(0, len(ids), 2):
        pair = [Sample(tuple(row[:PROMPT].tolist()), tuple(row[PROMPT:].tolist())) for row in ids[first : first + 2]]
        both, kept = make_batch(pair), torch.cat(masks[first : first + 2]).bool()
        sums.valid = both.mask.flatten()
        chosen = differentiable_logprobs(model, both)[kept]
        gradients.backward((chosen * random_signs(len(chosen), generator)).sum())


# --- the driver


def settings(**block) -> QuadsSettings:
    residual = {"score": "sensitivity", **block.pop("residual", {})}
    return QuadsSettings.from_dict({"arm": "quads", "rollout": {"residual": residual}, **block})


def test_when_it_measures(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from quads_recipe.sensitivity import due

    third = settings(sensitivity={"every": 3})
    assert [due(third, step, first=step == 1) for step in range(1, 8)] == [True, False, True, False, False, True, False]
    assert due(third, 7, first=True), "after a resume there is nothing to send"
    for without in (
        QuadsSettings.from_dict({"arm": "quads"}),
        settings(residual={"ratio": 1.0}),
        settings(residual={"ratio": 0.0}),
    ):
        assert not due(without, 3, first=True)


def test_the_trainers_side_asks_every_rank(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    from quads_recipe import probe, sensitivity

    asked = []
    group = SimpleNamespace(
        compute_leg_log_prob=lambda part: asked.append(part.extra_info[probe.LEG_FIELD]),
        update_sensitivities=lambda: asked.append("update") or [{"a": 1.0}, {"a": 1.0}],
    )
    found = sensitivity.run(group, SimpleNamespace(extra_info={}))
    assert asked == [sensitivity.LEG, "update"]
    assert found[:2] == [{"a": 1.0}] * 2 and found[2]["quads/sensitivity_seconds_max"] >= 0
