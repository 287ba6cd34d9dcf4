"""Models of unusual shapes in the rollout, and many updates in a row."""

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

from quads_ops.vllm_method.reload import WeightUpdate, settle  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]


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
        {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "hidden_size": 48, "vocab_size": 131},
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
