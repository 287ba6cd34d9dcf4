"""Quantized layers in a graph of torch.compile: one operator each, and the same graph for layers of one kind."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from quads_ops.vllm_method import opaque  # noqa: E402


class Layer(torch.nn.Module):
    """Stands for a vLLM layer: multiplies by a number of its own."""

    def __init__(self, name: str, factor: float):
        super().__init__()
        self.name = name
        self.quant_method = SimpleNamespace(run=lambda layer, x, *rest: x * factor)
        opaque.remember(name, self)

    def forward(self, x):
        return opaque.linear(self.name, self.quant_method.run, x, None, x.shape[1]) + 1


@pytest.fixture
def layers():
    return [Layer("m.layers.3.o_proj", 2.0), Layer("m.layers.4.o_proj", 3.0)]


def test_layers_of_one_kind_share_a_graph(layers):
    """With the name as a constant, vLLM would compile the part between two attentions anew for every layer."""
    code = []

    def backend(graph, inputs):
        code.append(graph.print_readable(print_output=False))
        return graph

    x = torch.randn(3, 8)
    for layer, factor in zip(layers, (2.0, 3.0), strict=True):
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), x * factor + 1)
    assert len(code) == 1 and "quads.vllm_linear" in code[0]
    assert not any(layer.name in code[0] for layer in layers)


def test_through_inductor(layers):
    x = torch.randn(3, 8)
    both = torch.compile(lambda x: layers[1](layers[0](x)), fullgraph=True)
    torch.testing.assert_close(both(x), (x * 2 + 1) * 3 + 1)


def test_without_compiling_the_layer_runs_itself(layers):
    x = torch.randn(3, 8)
    assert torch.equal(opaque.experts("unknown", lambda x, a, b: x - a, x, x, None), torch.zeros(3, 8))
