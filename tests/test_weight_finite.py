"""A weight that is NaN or infinite ends the weight export with its name."""

import pytest
import torch
from support_models import tiny_model

from quads_ops.matrix_plan import plan_parameters
from quads_ops.targets import Targets
from quads_recipe.weight_export import ReceiptWriter, stream
from quads_recipe.weight_finite import FiniteCheck, NonFiniteWeightsError


def export(model, receipts=True):
    plan = plan_parameters(model, Targets("all_linear"))
    writer = ReceiptWriter(plan, 0, 1) if receipts else None
    return list(stream(model.state_dict(), plan, writer, dtype=torch.bfloat16, model_type="qwen3_moe", device="cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.layers.0.input_layernorm.weight"])
def test_one_bad_value_is_named(name, value):
    model = tiny_model("qwen3_moe")
    assert export(model) and export(model, receipts=False)
    model.get_parameter(name).data.view(-1)[3] = value
    for receipts in (True, False):
        with pytest.raises(
            NonFiniteWeightsError, match=f"1 of .* parameters .* NaN or infinity: {name}[.] At the first"
        ):
            export(model, receipts)


def test_many_are_counted_and_integers_pass():
    check = FiniteCheck()
    check.add("counts", torch.tensor([1, 2]))
    check.add("empty", torch.empty(0))
    check.require()
    for index in range(6):
        check.add(f"w{index}", torch.tensor([1.0, float("nan")]))
    with pytest.raises(NonFiniteWeightsError, match="^6 of 6 .*: w0, w1, w2, w3 and 2 more"):
        check.require()
