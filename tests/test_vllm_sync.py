"""The worker extension in a real engine: verl's weight buckets in, receipts and a report out."""

import pytest
import support_vllm as support
import torch
from support_sync import EXTENSION, Trainer, running_engine

pytest.importorskip("vllm")

from quads_ops import receipt  # noqa: E402
from quads_ops.settings import SettingsError  # noqa: E402
from quads_ops.vllm_method import diagnosis  # noqa: E402
from quads_ops.vllm_method.reload import WeightUpdateError  # noqa: E402
from quads_recipe.run_id import ENV, new_run_id  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu(), pytest.mark.timeout(400)]

PROMPTS = support.prompts(4)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """(engine in this process, HF model, trainer), arm quads."""
    with running_engine(tmp_path_factory.mktemp("sync"), {"mode": "w4a4"}) as running:
        yield running


def test_report_of_a_sync(running):
    llm, model, trainer = running
    support.vllm_logprobs(llm, PROMPTS)  # of random weights: vLLM warms up with requests of its own
    (first,) = trainer.sync(support.checkpoint(model))
    receipt.compare(support.expected_receipts(model), first["receipt"])
    assert first["changed_codes"] is None, "there were only dummy weights before"
    assert first["rac"]["from_prior"] is True and first["rac"]["ratio"] == 0.5
    assert first["rac"]["energy_covered"] is None
    assert first["path"].startswith("cpu: torch") and 0 < first["seconds"] < 60

    support.vllm_logprobs(llm, PROMPTS)
    (second,) = trainer.sync(support.checkpoint(model))
    assert second["changed_codes"] == 0.0
    assert second["rac"]["from_prior"] is False
    assert 0.2 < second["rac"]["energy_covered"] < 1 and 0 < second["rac"]["mask_moved"] <= 1

    support.randomize(model, 3)
    (third,) = trainer.sync(support.checkpoint(model))
    receipt.compare(support.expected_receipts(model), third["receipt"])
    assert 0.5 < third["changed_codes"] < 1
    assert third["rac"]["energy_covered"] is None, "nothing was generated since"
    assert set(third["changed_codes_by_matrix"]) == set(third["receipt"])


def test_masks_are_frozen_between_syncs(running):
    llm, model, trainer = running
    trainer.sync(support.checkpoint(model))

    def masks():
        return [entry["mask"] for entry in llm.collective_rpc("quads_masks")[0]]

    before = masks()
    first = support.vllm_logprobs(llm, PROMPTS)
    support.vllm_logprobs(llm, support.prompts(8, seed=9))
    assert masks() == before
    assert support.worst(first, support.vllm_logprobs(llm, PROMPTS)) == 0.0
    llm.collective_rpc("quads_refresh_masks")
    assert masks() != before


def test_methods_for_looking_and_trying(running):
    llm, _, _ = running
    llm.collective_rpc("quads_reset_statistics")
    support.vllm_logprobs(llm, PROMPTS)
    state = llm.collective_rpc("quads_state")[0]
    tokens = sum(len(ids) for ids in PROMPTS)
    assert state["model.layers.0.self_attn.qkv_proj (weight)"]["tokens"] == [tokens]
    assert sum(state["model.layers.1.mlp.experts (w2)"]["tokens"]) == 2 * tokens
    half = support.vllm_logprobs(llm, PROMPTS)
    llm.collective_rpc("quads_set_residual", args=(1.0,))
    assert llm.collective_rpc("quads_state")[0]["model.layers.0.mlp.experts (w13)"]["residual"] == "all"
    assert support.worst(half, support.vllm_logprobs(llm, PROMPTS)) > 0
    llm.collective_rpc("quads_set_residual", args=(0.5,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "captures_graphs", lambda config: True)
        with pytest.raises(SettingsError, match="CUDA graphs keep the ratio .* enforce_eager=True"):
            llm.collective_rpc("quads_set_residual", args=(1.0,))


def test_failures_reach_the_trainer_and_leave_nobody_waiting(running):
    llm, model, trainer = running
    items = support.checkpoint(model)
    name, tensor = items[8]
    bad = torch.full_like(tensor, torch.inf)
    streams = {
        "ended without lm_head.weight": items[:-1],
        "does not have": [("model.nonsense", torch.zeros(3)), *items],
        f"NaN or Inf in {name}": [*items[:8], (name, bad), *items[9:]],
    }
    for message, stream in streams.items():
        with pytest.raises(WeightUpdateError, match=message):
            trainer.sync(stream)
        assert not trainer.stuck
    (report,) = trainer.sync(items)
    receipt.compare(support.expected_receipts(model), report["receipt"])
    support.vllm_logprobs(llm, PROMPTS)


def test_two_tensor_parallel_workers_give_the_receipts_of_one(monkeypatch, tmp_path):
    monkeypatch.setenv(ENV, new_run_id())
    model = support.make_model(tmp_path, "qwen3_moe", num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1)
    with support.engine(
        tmp_path,
        {"mode": "w4a4"},
        in_process=False,
        worker_extension_cls=EXTENSION,
        tensor_parallel_size=2,
    ) as llm:
        support.randomize(model, 5)
        trainer = Trainer(llm, 2)
        reports = trainer.sync(support.checkpoint(model))
        for report in reports:
            receipt.compare(support.expected_receipts(model), report["receipt"])
        assert reports[0]["changed_codes_by_matrix"] == reports[1]["changed_codes_by_matrix"]
        totals = {name: total for name, (_, total) in reports[0]["changed_codes_by_matrix"].items()}
        assert totals == {name: w.numel() for name, (w, _) in support.quantized_groups(model).items()}
        assert reports[0]["changed_codes"] > 0.5
        llm.collective_rpc("quads_set_residual", args=(0.0,))
        support.vllm_logprobs(llm, PROMPTS)
        with pytest.raises(Exception, match="worker 0: .*ended without lm_head.weight.*worker 1: "):
            trainer.sync(support.checkpoint(model)[:-1])
        assert not trainer.stuck
