"""The prompts that the first step's masks come from. The run itself: tests/test_e2e.py."""

import pytest
from transformers import AutoTokenizer

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe.mask_warmup import WarmupError, check_prompts, training_prompts, wanted
from quads_recipe.paths import policy_dir


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(policy_dir("natural"))


def dataset(texts) -> list[dict]:
    return [{"raw_prompt": [{"role": "user", "content": text}]} for text in texts]


def test_only_masks_that_stay_frozen_are_warmed_up():
    def of(**rollout):
        return wanted(QuadsSettings.from_dict({"arm": "quads", "rollout": rollout}))

    assert of()
    assert not of(warmup=0)
    assert not of(residual={"ratio": 1})
    assert not of(residual={"ratio": 0})
    assert not of(residual={"scope": "token"})
    assert not wanted(QuadsSettings.from_dict({"arm": "qat"}))


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_wrong_number_of_prompts(value):
    with pytest.raises(SettingsError, match="quads.rollout.warmup"):
        QuadsSettings.from_dict({"rollout": {"warmup": value}})


def test_prompts_are_spread_over_the_data(tokenizer):
    texts = [str(number) for number in range(100, 200)]
    prompts = training_prompts(dataset(texts), 10, tokenizer, {})
    assert len(prompts) == 10
    for prompt, text in zip(prompts, texts[::10], strict=True):
        assert text in tokenizer.decode(prompt)
        assert prompt == tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )


def test_fewer_prompts_than_asked_for(tokenizer):
    assert len(training_prompts(dataset(["1", "2", "3"]), 32, tokenizer, {})) == 3


def test_prompts_that_verl_would_cut():
    prompts = [[1] * 4, [1] * 9, [1] * 12]
    check_prompts(prompts, 12, "error", 10)
    with pytest.raises(WarmupError, match="data.max_prompt_length = 8: 2 of 3 .* longer .up to 12 tokens"):
        check_prompts(prompts, 8, "error", 10)
    check_prompts(prompts, 8, "left", 10)  # asked for
    with pytest.raises(WarmupError, match="3 of 3"):
        check_prompts(prompts, 3, "left", 10)


def test_tokens_without_an_embedding():
    check_prompts([[3, 17]], 8, "error", 18)
    with pytest.raises(WarmupError, match="model.path: .* token 18, but the model has only 18"):
        check_prompts([[3, 18]], 8, "error", 18)
