"""Every supported family in a real vLLM engine, in every mode: after loading and after a live reload."""

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

from quads_ops.residual import compensate  # noqa: E402
from quads_ops.vllm_method.projection import projections  # noqa: E402
from quads_ops.vllm_method.reload import WeightUpdate, settle  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]

PROMPTS = support.prompts()


def sync(llm, model, dtype=torch.float32) -> None:
    """What the trainer's weight sync does."""
    runner = support.model_runner(llm)
    update = WeightUpdate(runner.get_model(), runner.vllm_config, torch.device("cpu"))
    update.begin()
    update.load([(name, tensor.to(dtype)) for name, tensor in support.checkpoint(model)])
    update.finish()
    settle(runner.get_model())


def mean_difference(a, b) -> float:
    return float((torch.cat(a) - torch.cat(b)).abs().mean())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_moe", {}),  # shared expert with its gate, biases of q, k and v
        ("mixtral", {}),  # other names in the checkpoint and in vLLM
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_family_in_w4a16(family, overrides, tmp_path):
    model = support.make_model(tmp_path, family, **overrides)
    with support.engine(tmp_path, {"mode": "w4a16"}) as llm:
        loaded = {shard.name for p in projections(support.model_runner(llm).get_model()) for shard in p.shards}
        assert loaded == set(support.quantized_groups(model))
        for seed in (None, 5):
            if seed is not None:
                support.randomize(model, seed)
                sync(llm, model)
            rollout = support.vllm_logprobs(llm, PROMPTS)
            expected = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
            assert support.worst(rollout, expected) <= 1e-5
            assert support.worst(rollout, support.hf_logprobs(model, PROMPTS)) > 0.1


def test_experts_alone(tmp_path):
    model = support.make_model(tmp_path, "qwen3_moe")
    with support.engine(tmp_path, {"mode": "w4a16", "targets": "experts"}) as llm:
        support.randomize(model, 5)
        sync(llm, model)
        rollout = support.vllm_logprobs(llm, PROMPTS)
    expected = support.hf_logprobs(support.fake_quantized(model, experts_only=True), PROMPTS)
    assert support.worst(rollout, expected) <= 1e-5


def compensated_hf(model, residual):
    """The model with fake-quantized weights, whose linear inputs go through `compensate`."""
    model = support.fake_quantized(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            module.register_forward_pre_hook(
                lambda _, args: (compensate(args[0].flatten(0, -2), "w4a4", residual).view_as(args[0]),)
            )
    return model


def test_dense_w4a4_and_its_residual(tmp_path):
    model = support.make_model(tmp_path, "qwen3", tie_word_embeddings=True)
    with support.engine(tmp_path, {"mode": "w4a4", "residual": {"ratio": 0.0}}) as llm:
        support.randomize(model, 5)
        sync(llm, model)
        plain = support.vllm_logprobs(llm, PROMPTS)
        for projection in projections(support.model_runner(llm).get_model()):
            projection.compensation.set_ratio(1.0)
        full = support.vllm_logprobs(llm, PROMPTS)
    weights_only = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
    for rollout, residual in ((plain, None), (full, "all")):
        same = support.hf_logprobs(compensated_hf(model, residual), PROMPTS)
        # A last-bit difference of an activation can cross a rounding boundary, so not all tokens agree as closely.
        assert float((torch.cat(rollout) - torch.cat(same)).abs().median()) < 1e-5
        assert mean_difference(rollout, same) < 0.1 * mean_difference(rollout, weights_only)
    assert mean_difference(full, weights_only) < 0.3 * mean_difference(plain, weights_only)


def test_modes_in_bf16(tmp_path):
    """bf16 and fp8 are closer to the full precision model than NVFP4; residuals bring W4A4 close to W4A16."""
    model = support.make_model(tmp_path, "qwen3_moe", dtype=torch.bfloat16, tie_word_embeddings=True)
    support.randomize(model, 5)
    rollout = {}
    for mode, ratio in (("bf16", None), ("fp8", None), ("w4a4", 0.0), ("w4a4", 1.0)):
        options = {"mode": mode} if ratio is None else {"mode": mode, "residual": {"ratio": ratio}}
        with support.engine(tmp_path, options, dtype="bfloat16") as llm:
            sync(llm, model, torch.bfloat16)
            rollout[mode, ratio] = support.vllm_logprobs(llm, PROMPTS)
    full = support.hf_logprobs(model, PROMPTS)
    weights_only = support.hf_logprobs(support.fake_quantized(model), PROMPTS)
    error = {key: mean_difference(logprobs, full) for key, logprobs in rollout.items()}
    assert error["bf16", None] < 0.05
    assert error["bf16", None] < error["fp8", None] < error["w4a4", 0.0]
    activation = {ratio: mean_difference(rollout["w4a4", ratio], weights_only) for ratio in (0.0, 1.0)}
    assert activation[1.0] < 0.5 * activation[0.0]


def test_under_torch_compile(tmp_path):
    """vLLM compiles unless enforce_eager is set; the quantized layers stay whole in the graph."""
    model = support.make_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    with support.engine(tmp_path, {"mode": "w4a16"}, enforce_eager=False) as llm:
        compiled = support.vllm_logprobs(llm, PROMPTS)
    assert support.worst(compiled, support.hf_logprobs(support.fake_quantized(model), PROMPTS)) <= 1e-5


def test_a_k_that_is_no_multiple_of_16_is_refused(tmp_path):
    support.make_model(tmp_path, "qwen3_moe", moe_intermediate_size=40)
    with pytest.raises(ValueError, match=r"mlp\.experts \(down\) has K = 40 .* not a multiple of 16"):
        with support.engine(tmp_path, {"mode": "w4a16"}):
            pass
