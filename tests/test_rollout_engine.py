"""The engine of `quads diagnose` and of the study's evaluations, with more prompts than vLLM takes at once."""

import pytest
import support_vllm as support
from support_models import save_checkpoint

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.rollout_engine import EngineOptions, RolloutEngine

pytestmark = [pytest.mark.integration, support.vllm_cpu()]
LENGTH, NEW = 200, 2


def test_prompts_that_do_not_fit_in_one_batch(tmp_path):
    """vLLM cuts one of them in two by default, which ends the engine on a CPU, for these requests have seeds."""
    model = str(save_checkpoint(tmp_path, "qwen3_moe"))
    options = EngineOptions(model, "float32", LENGTH + NEW, stop_token_ids=())
    settings = QuadsSettings.from_dict({"arm": "naive"})
    with support.fresh_cpu_worker(), RolloutEngine(options, settings) as engine:
        room = engine._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        assert room % LENGTH, "a batch of whole prompts: choose another length"
        prompts = [[6 + (i + j) % 20 for j in range(LENGTH)] for i in range(room // LENGTH + 2)]
        generated = engine.generate(prompts, NEW, seed=0)
        alone = engine.generate(prompts[-1:], NEW, seed=len(prompts) - 1)
    assert [len(one.sample.response) for one in generated] == [NEW] * len(prompts)
    assert alone[0].sample == generated[-1].sample
