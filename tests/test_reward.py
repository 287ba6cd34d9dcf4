"""The demo's reward: reasoning-gym's scorer behind verl's interface."""

import json

import pytest
from omegaconf import OmegaConf

from quads_recipe.demo_data import row
from quads_recipe.policy.task import problems, worked_answer
from quads_recipe.reward import compute_score, extract_answer


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("98-93=5;5+77=82", 1.0),
        ("98-93=6;6+77=82", 1.0),  # only the last sum counts
        ("98-93=5;5+77=82<eos><pad><pad>", 1.0),
        ("=+082.0", 1.0),  # reasoning-gym compares numbers
        ("98-93=5;5+77=83", 0.0),
        ("98-93=5;5+77=-82", 0.0),
        ("98-93=5;5+77=182", 0.0),  # reasoning-gym gives this partial credit; here it is wrong
        ("98-93=5;5+77=82;", 0.0),
        ("98-93=5", 0.0),
        ("82", 0.0),
        ("=", 0.0),
        ("", 0.0),
    ],
)
def test_score_of_responses(response, score):
    assert compute_score("chain_sum", response, "82") == score


def test_answer_is_what_follows_the_last_equals_sign():
    assert extract_answer("1+2=3;3+4=7") == "7"
    assert extract_answer("7") is None


def test_unknown_dataset_is_an_error():
    with pytest.raises(ValueError, match="no_such_task"):
        compute_score("no_such_task", "=1", "1")


def test_metadata_reaches_the_scorer_of_a_task_that_needs_it():
    """countdown has many right answers: its scorer evaluates the expression against the numbers in the metadata."""
    metadata = json.dumps({"numbers": [3, 5, 7], "target": 15})
    extra = {"metadata": metadata}
    assert compute_score("countdown", "=3+5+7", "7+5+3", extra) == 1.0
    assert compute_score("countdown", "=3+5+8", "7+5+3", extra) == 0.0


def test_verl_finds_the_function_and_scores_a_row_of_the_demo_data():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    reward = {"custom_reward_function": {"path": "pkg://quads_recipe.reward", "name": "compute_score"}}
    score = get_custom_reward_fn(OmegaConf.create({"reward": reward}))
    (problem,) = problems("train", 1)
    line = row(problem, 0, "train")
    arguments = {
        "data_source": line["data_source"],
        "ground_truth": line["reward_model"]["ground_truth"],
        "extra_info": {**line["extra_info"], "num_turns": 2, "rollout_reward_scores": {}},
    }
    assert score(solution_str=worked_answer(problem.prompt), **arguments) == 1.0
    assert score(solution_str="=1000", **arguments) == 0.0
