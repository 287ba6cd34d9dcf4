"""A real vLLM engine on a CPU: weights equal to the trainer's, and live reload bit for bit from any stream."""

import random

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

from quads_ops import receipt  # noqa: E402
from quads_ops.vllm_method.projection import projections  # noqa: E402
from quads_ops.vllm_method.reload import WeightUpdate, WeightUpdateError, combine_loaded, settle  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]

PROMPTS = support.prompts()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """(engine, HF model with the same weights): Qwen3-MoE, w4a16, FP32."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = support.make_model(folder, "qwen3_moe")
    with support.engine(folder, {"mode": "w4a16"}) as llm:
        yield llm, model


def update(llm, buckets) -> dict[str, receipt.Entry]:
    """One weight update of a running engine; returns the receipts. Undone if it fails."""
    runner = support.model_runner(llm)
    weight_update = WeightUpdate(runner.get_model(), runner.vllm_config, torch.device("cpu"))
    try:
        weight_update.begin()
        for bucket in buckets:
            weight_update.load(bucket)
        loaded = weight_update.finish()
    except Exception as error:
        weight_update.abort(str(error))
        raise
    settle(runner.get_model())
    return combine_loaded([loaded]).receipts


def reused_buckets(items, seed: int):
    """Random order, random boundaries, and one set of buffers that every bucket overwrites."""
    rng = random.Random(seed)
    items = list(items)
    rng.shuffle(items)
    buffers = [torch.empty(max(t.numel() for _, t in items)) for _ in range(9)]
    while items:
        bucket = []
        for buffer in buffers[: rng.randint(1, len(buffers))]:
            if items:
                name, tensor = items.pop()
                bucket.append((name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)))
        yield bucket
        for buffer in buffers:
            buffer.fill_(torch.nan)


def test_logprobs_equal_the_trainers_with_fake_quantized_weights(running):
    llm, model = running
    rollout = support.vllm_logprobs(llm, PROMPTS)
    assert support.worst(rollout, support.hf_logprobs(support.fake_quantized(model), PROMPTS)) <= 1e-5
    # Negative controls: without any fake quantization, and without that of attention.
    assert support.worst(rollout, support.hf_logprobs(model, PROMPTS)) > 0.1
    partly = support.fake_quantized(model, experts_only=True)
    assert support.worst(rollout, support.hf_logprobs(partly, PROMPTS)) > 0.1


def test_a_prompt_does_not_depend_on_its_batch(running):
    llm, _ = running
    together = support.vllm_logprobs(llm, PROMPTS)
    assert support.worst(together, support.vllm_logprobs(llm, PROMPTS, one_by_one=True)) <= 1e-6


def test_reload_is_bit_equal_and_keeps_every_address(running):
    llm, model = running
    vllm_model = support.model_runner(llm).get_model()

    def tensors() -> dict:
        named = [*vllm_model.named_parameters(), *vllm_model.named_buffers()]
        return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in named}

    before = tensors()
    for seed in range(3):
        support.randomize(model, 100 + seed)
        receipts = update(llm, reused_buckets(support.checkpoint(model), seed))
        receipt.compare(support.expected_receipts(model), receipts)
        for projection in projections(vllm_model):
            fresh = {s.name for s in projection.shards} & set(receipts)
            assert len(fresh) == len(projection.shards)
        expected = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
        assert support.worst(support.vllm_logprobs(llm, PROMPTS), expected) <= 1e-5
    assert tensors() == before


def wrong_streams(items):
    index = {name: i for i, (name, _) in enumerate(items)}
    expert = index["model.layers.1.mlp.experts.2.up_proj.weight"]
    norm = index["model.layers.0.input_layernorm.weight"]

    def changed(i, tensor):
        return [*items[:i], (items[i][0], tensor), *items[i + 1 :]]

    not_a_number = items[expert][1].clone()
    not_a_number[1, 2] = torch.nan
    return {
        "missing": (items[:expert] + items[expert + 1 :], r"ended without .*layers\.1\.mlp\.experts\.2\.up_proj"),
        "missing norm": (items[:norm] + items[norm + 1 :], r"ended without model\.layers\.0\.input_layernorm"),
        "empty": ([], r"ended without lm_head\.weight, .* and \d+ more"),
        "twice": (items + items[expert : expert + 1], r"experts\.2\.up_proj\.weight twice"),
        "unknown": (
            [*items, ("model.layers.9.mlp.gate.weight", torch.zeros(4, 64))],
            "which the rollout's model does not",
        ),
        "shape": (changed(expert, items[expert][1][:1]), r"shape \(1, 64\); needed \(32, 64\)"),
        "norm shape": (changed(norm, torch.ones(3)), r"input_layernorm\.weight with shape \(3,\); needed \(64,\)"),
        "dtype": (changed(expert, items[expert][1].int()), "a floating point tensor is needed"),
        "NaN": (changed(expert, not_a_number), r"NaN or Inf in model\.layers\.1\.mlp\.experts\.2\.up_proj"),
    }


def test_wrong_streams_are_named_and_a_good_one_repairs(running):
    llm, model = running
    items = support.checkpoint(model)
    for stream, message in wrong_streams(items).values():
        with pytest.raises(WeightUpdateError, match=message):
            update(llm, [stream[i : i + 7] for i in range(0, len(stream), 7)] or [[]])
    assert support.model_runner(llm).get_model()._forward_pre_hooks, "mixed weights must not run"
    receipt.compare(support.expected_receipts(model), update(llm, [items]))
    expected = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
    assert support.worst(support.vllm_logprobs(llm, PROMPTS), expected) <= 1e-5


def test_a_model_of_mixed_weights_refuses_to_run(running):
    llm, model = running
    items = support.checkpoint(model)
    with pytest.raises(WeightUpdateError):
        update(llm, [items[:-1]])
    vllm_model = support.model_runner(llm).get_model()
    with pytest.raises(RuntimeError, match=r"left old and new weights mixed: .* ended without"):
        vllm_model(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    # After a CUDA graph of the whole model, which is replayed without calling it, the logits are all there is.
    with pytest.raises(RuntimeError, match="left old and new weights mixed"):
        vllm_model.compute_logits(torch.zeros(1, 64))
    update(llm, [items])
    support.vllm_logprobs(llm, PROMPTS)


def test_nothing_is_refused_when_nothing_was_loaded(running):
    llm, model = running
    with pytest.raises(WeightUpdateError, match="does not have"):
        update(llm, [[("nonsense", torch.zeros(3))]])
    expected = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
    assert support.worst(support.vllm_logprobs(llm, PROMPTS), expected) <= 1e-5


def test_vllms_own_reload_is_bit_equal_too(running):
    llm, model = running
    support.randomize(model, 7)
    named = [(name, tensor.clone()) for name, tensor in support.checkpoint(model)]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
    receipts = {}
    for projection in projections(support.model_runner(llm).get_model()):
        receipts |= projection.weight.receipts()
    receipt.compare(support.expected_receipts(model), receipts)
