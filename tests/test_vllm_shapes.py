"""Models of unusual shapes in the rollout, and many updates in a row."""

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

from quads_ops.vllm_method.reload import WeightUpdate, settle  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]

SMALLEST = {
    "hidden_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 1,
    "vocab_size": 131,
}


def update(model, config, source) -> None:
    """One weight update, as the trainer's sync does it."""
    weights = WeightUpdate(model, config, torch.device("cpu"))
    weights.begin()
    weights.load(support.checkpoint(source))
    weights.finish()
    settle(model)


def tensors(model) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        SMALLEST,
        {"num_experts_per_tok": 4, "tie_word_embeddings": True},
    ],
    ids=["usual", "smallest", "all experts"],
)
def test_five_updates_leave_what_a_first_load_leaves(tmp_path, shapes):
    """Every parameter and buffer, masks included, in every bit."""
    source = support.make_model(tmp_path / "first", "qwen3_moe", num_hidden_layers=1, **shapes)
    options = {"mode": "w4a4", "residual": {"ratio": 0.5}}
    with support.model_loader() as load:
        model, config = load(tmp_path / "first", options)
        initial = {name: tensor.clone() for name, tensor in tensors(model).items()}
        for seed in range(5):
            support.randomize(source, 100 + seed)
            update(model, config, source)
        source.save_pretrained(tmp_path / "last")
        fresh = tensors(load(tmp_path / "last", options)[0])
        after = tensors(model)
    assert after.keys() == fresh.keys() == initial.keys()
    assert [name for name in after if not torch.equal(after[name], fresh[name])] == []
    changed = [name for name in after if not torch.equal(after[name], initial[name])]
    assert any("packed" in name or name.endswith("weight") for name in changed)


def generated(llm, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens and their logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
    logprobs = [[entry[t].logprob for t, entry in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    return [list(o.token_ids) for o in outputs], [torch.tensor(row) for row in logprobs]


@pytest.mark.parametrize(
    ("shapes", "schedule"),
    [
        (SMALLEST, {}),
        # One sequence at a time, prompts in pieces of 8 tokens, and the second time from the cache.
        (
            {"num_hidden_layers": 1, "num_experts_per_tok": 4},
            {"max_num_seqs": 1, "max_num_batched_tokens": 8, "enable_prefix_caching": True, "block_size": 16},
        ),
    ],
    ids=["smallest", "pieces"],
)
def test_generated_logprobs_equal_the_trainers(tmp_path, shapes, schedule):
    """Prompts of 1 to 37 tokens, the largest token id among them."""
    model = support.make_model(tmp_path, "qwen3_moe", **shapes)
    last = model.config.vocab_size - 1
    prompts = [[7], [last], *support.prompts(2, 36), [*support.prompts(1, 36)[0], last]]
    fake_quantized = support.fake_quantized(model)
    with support.engine(tmp_path, {"mode": "w4a16"}, **schedule) as llm:
        for _ in range(2):
            tokens, logprobs = generated(llm, prompts, 4)
            expected = support.hf_logprobs(fake_quantized, [p + t for p, t in zip(prompts, tokens, strict=True)])
            assert support.worst(logprobs, [row[-4:] for row in expected]) <= 1e-5
        rollout = support.vllm_logprobs(llm, prompts[2:])
    assert support.worst(rollout, support.hf_logprobs(fake_quantized, prompts[2:])) <= 1e-5
