"""The process that holds the engines of an evaluation: `python -m quads_recipe.study.evaluate_worker REQUEST.json`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.prompts import fitting, read_prompts, tokenize
from quads_recipe.analysis.rollout_engine import EngineOptions, Generated, RolloutEngine
from quads_recipe.analysis.rollouts import RolloutKey, with_rollout
from quads_recipe.study.evaluate import Settings
from quads_recipe.study.plan import write_atomically

_CALIBRATION_SEED = 1_000_000
_GPU_MEMORY = 0.85


def main(argv: list[str]) -> int:
    """Makes the evaluations in order; an error ends it at the first that fails."""
    request = json.loads(Path(argv[0]).read_text())
    settings = Settings(**request["settings"])
    problems = Problems(settings)
    for job in request["jobs"]:
        started = time.monotonic()
        found = evaluate(job, settings, problems)
        found["seconds"] = round(time.monotonic() - started, 1)
        write_atomically(Path(job["result"]), json.dumps(found) + "\n")
        print(f"evaluated {job['name']}: {found['pass_at_1']:.4f} in {found['seconds']} s", flush=True)
    return 0


class Problems:
    """Held-out problems with what their reward needs, and the reward."""

    def __init__(self, settings: Settings):
        import pandas

        self.rows = pandas.read_parquet(settings.heldout).to_dict("records")
        self.prompts = read_prompts(Path(settings.heldout))
        self.calibration = read_prompts(Path(settings.calibration))[: settings.calibration_prompts]
        self._score = reward_function(settings)

    def score(self, index: int, text: str) -> float:
        """The reward of a response to problem `index`."""
        row = self.rows[index]
        value = self._score(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row.get("extra_info"),
        )
        score = float(value["score"] if isinstance(value, dict) else value)
        if not math.isfinite(score):
            raise ValueError(
                f"reward.custom_reward_function: the reward of held-out problem {index} is {score}, which no mean can "
                "hold; it must return a finite number"
            )
        return score


def reward_function(settings: Settings):
    """The run's own: `reward.custom_reward_function`, or verl's by data source."""
    if settings.reward_path:
        from verl.utils.import_utils import load_extern_object

        return load_extern_object(settings.reward_path, settings.reward_name)
    from verl.utils.reward_score import default_compute_score

    return default_compute_score


def evaluate(job: dict, settings: Settings, problems: Problems) -> dict:
    """pass@1 of one set of weights in one engine, per problem, with sampling at temperature 1 as in training.

    Residual masks are chosen first, from responses to training problems, as a weight sync chooses them. Held-out
    prompts longer than `max_prompt` are left out.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["weights"])
    prompts = tokenize(problems.prompts, tokenizer)
    kept = [i for i, prompt in enumerate(prompts) if len(prompt) <= settings.max_prompt]
    key = RolloutKey(job["engine"]["mode"], job["engine"]["ratio"])
    quads = with_rollout(QuadsSettings.from_dict(job["engine"]["block"]), key)
    covered = None
    with RolloutEngine(_options(job["weights"], tokenizer, settings), quads) as engine:
        if 0 < key.ratio < 1 and quads.rollout.residual.scope == "step":
            calibration = fitting(tokenize(problems.calibration, tokenizer), settings.max_prompt)
            engine.generate(calibration, settings.max_new, settings.seed + _CALIBRATION_SEED)
            engine.choose_masks()
        repeated = [prompts[i] for i in kept for _ in range(settings.samples)]
        generated = engine.generate(repeated, settings.max_new, settings.seed)
        if key.ratio > 0:
            covered = _covered(engine.choose_masks())
    per_problem = _scores(generated, kept, settings.samples, tokenizer, problems)
    lengths = [len(g.sample.response) for g in generated]
    return {
        "name": job["name"],
        "mode": key.mode,
        "ratio": key.ratio,
        "pass_at_1": sum(per_problem) / len(per_problem),
        "problems": len(per_problem),
        "samples": settings.samples,
        "per_problem": per_problem,
        "length": sum(lengths) / len(lengths),
        "energy_covered": covered,
    }


def _options(weights: str, tokenizer, settings: Settings) -> EngineOptions:
    from quads_recipe.diagnose_run import stop_tokens

    return EngineOptions(
        model=weights,
        dtype=settings.dtype,
        max_model_len=settings.max_prompt + settings.max_new + 1,
        stop_token_ids=stop_tokens(weights, tokenizer),
        gpu_memory_utilization=_GPU_MEMORY,
    )


def _covered(masks: Sequence[dict]) -> float | None:
    found = [m["energy_covered"] for m in masks if m and m.get("energy_covered") is not None]
    return sum(found) / len(found) if found else None


def _scores(
    generated: Sequence[Generated], kept: list[int], samples: int, tokenizer, problems: Problems
) -> list[float]:
    """Mean reward of each problem's responses."""
    texts = [tokenizer.decode(list(g.sample.response), skip_special_tokens=True) for g in generated]
    scores = [problems.score(kept[n // samples], text) for n, text in enumerate(texts)]
    return [sum(scores[n : n + samples]) / samples for n in range(0, len(scores), samples)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
