"""Faults of vLLM that quads_ops.vllm_method.cpu_reload works around. When one of these tests fails, vLLM no longer has
the fault, and the workaround named in it can go."""

import pytest
import support_vllm as support
import torch

pytest.importorskip("vllm")

pytestmark = [pytest.mark.integration, support.vllm_cpu()]

PROMPTS = support.prompts(3)


def reload_as_vllm_does(llm, model, dtype) -> None:
    named = [(name, tensor.to(dtype)) for name, tensor in support.checkpoint(model)]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})


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
        support.randomize(model, 5)
        reload_as_vllm_does(llm, model, torch.bfloat16)
        assert support.worst(support.vllm_logprobs(llm, PROMPTS), support.hf_logprobs(model, PROMPTS)) > 1.0
