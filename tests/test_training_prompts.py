"""Training prompts as the run sees them: which are looked at, and which it can't begin with."""

import pytest
from transformers import AutoTokenizer

from quads_recipe.paths import policy_dir
from quads_recipe.training_prompts import PromptError, check, check_count, spread, tokenized


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(policy_dir("natural"))


def dataset(texts) -> list[dict]:
    return [{"raw_prompt": [{"role": "user", "content": text}]} for text in texts]


@pytest.mark.parametrize(("items", "count"), [(1000, 256), (257, 256), (300, 32), (5, 32), (1, 1), (0, 3), (7, 0)])
def test_spread_evenly_to_the_end(items, count):
    chosen = spread(range(items), count)
    assert len(set(chosen)) == len(chosen) == min(items, count)
    gaps = [b - a for a, b in zip(chosen, [*chosen[1:], items], strict=True)] if chosen else [0]
    assert max(gaps) - min(gaps) <= 1


def test_prompts_are_spread_over_the_data(tokenizer):
    texts = [str(number) for number in range(100, 200)]
    prompts = tokenized(dataset(texts), 10, tokenizer, {})
    assert len(prompts) == 10
    for prompt, text in zip(prompts, texts[::10], strict=True):
        assert text in tokenizer.decode(prompt)
        assert prompt == tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )


def test_fewer_prompts_than_asked_for(tokenizer):
    assert len(tokenized(dataset(["1", "2", "3"]), 32, tokenizer, {})) == 3


def test_fewer_prompts_than_a_batch():
    check_count(16, 16, kept=False)
    with pytest.raises(PromptError, match="data.train_batch_size = 16: only 15 training prompts are left.*lower it$"):
        check_count(15, 16, kept=True)
    with pytest.raises(PromptError, match="raise data.max_prompt_length"):
        check_count(0, 16, kept=False)


def test_prompts_that_verl_would_cut():
    prompts = [[1] * 4, [1] * 9, [1] * 12]
    check(prompts, 12, "error", 10)
    with pytest.raises(PromptError, match="data.max_prompt_length = 8: 2 of 3 .* longer .up to 12 tokens"):
        check(prompts, 8, "error", 10)
    check(prompts, 8, "left", 10)  # asked for
    with pytest.raises(PromptError, match="3 of 3"):
        check(prompts, 3, "left", 10)


def test_tokens_without_an_embedding():
    check([[3, 17]], 8, "error", 18)
    with pytest.raises(PromptError, match="model.path: .* token 18, but the model has only 18"):
        check([[3, 18]], 8, "error", 18)
