"""Faults of vLLM that quads_ops.vllm_method.cpu_reload works around. When one of these tests fails, vLLM no longer has
the fault, and the workaround named in it can go."""

import pytest
import support_vllm as support
import torch

from quads_ops import compat

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.integration,
    support.vllm_cpu(),
    pytest.mark.skipif(
        (compat.installed_version("vllm") or "").startswith("0.24."), reason="vLLM 0.24 does not have these faults yet"
    ),
]

PROMPTS = support.prompts(3)


def reload_as_vllm_does(llm, model, dtype) -> None:
    named = [(name, tensor.to(dtype)) for name, tensor in support.checkpoint(model)]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})


def packs_with_onednn() -> bool:
    from vllm import _custom_ops as ops

    try:
        ops.create_onednn_mm(torch.ones(64, 64, dtype=torch.bfloat16).t(), 32)
    except RuntimeError:
        return False
    return True


def test_cpu_experts_are_not_packed_again(tmp_path):
    """fresh_cpu_moe_kernels"""
    model = support.make_model(tmp_path, "qwen3_moe")
    with support.engine(tmp_path, None) as llm:
        support.randomize(model, 5)
        reload_as_vllm_does(llm, model, torch.float32)
        assert support.worst(support.vllm_logprobs(llm, PROMPTS), support.hf_logprobs(model, PROMPTS)) > 0.01


def test_a_tied_head_keeps_the_old_weights(tmp_path):
    """repack_tied_head"""
    model = support.make_model(tmp_path, "qwen3", dtype=torch.bfloat16, tie_word_embeddings=True)
    with support.engine(tmp_path, None, dtype="bfloat16") as llm:
        if not packs_with_onednn():
            pytest.skip("oneDNN has no BF16 product for this CPU, so vLLM keeps no packed copy of the head")
        support.randomize(model, 5)
        reload_as_vllm_does(llm, model, torch.bfloat16)
        assert support.worst(support.vllm_logprobs(llm, PROMPTS), support.hf_logprobs(model, PROMPTS)) > 1.0
