"""Synthetic study folders: what `quads study` leaves behind, without any training."""

from __future__ import annotations

import json
import random
from pathlib import Path

from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import Plan, to_json

ARMS = ("bf16", "fp8", "naive", "qat", "symmetric", "quads", "quads_full")
# arm: mean |d|, reward at the start, gain in reward, of which seen in BF16; and the parts of d
WORLD = {
    "bf16": (0.0016, 0.50, 0.10, (0.0, 0.0, 0.0016)),
    "fp8": (0.0073, 0.49, 0.10, (0.004, 0.005, 0.0016)),
    "naive": (0.0889, 0.40, 0.06, (0.05, 0.07, 0.0017)),
    "qat": (0.0600, 0.41, 0.09, (0.0, 0.059, 0.0017)),
    "symmetric": (0.0475, 0.40, 0.08, (0.0, 0.0, 0.0475)),
    "quads": (0.0083, 0.495, 0.10, (0.0, 0.0081, 0.0016)),
    "quads_full": (0.0057, 0.50, 0.10, (0.0, 0.0055, 0.0016)),
}
ENGINES = {"bf16": "bf16", "fp8": "fp8", "naive": "w4a4", "qat": "w4a4", "symmetric": "w4a4",
           "quads": "w4a4-0.5", "quads_full": "w4a4-1"}  # fmt: skip


def make_plan(**changes) -> Plan:
    values = {
        "preset": "paper-mini", "stress": (), "config": "quads_demo", "arms": ARMS, "seeds": (0, 1, 2), "steps": 24,
        "policy": "outlier", "policy_digest": "ab" * 32, "outliers": {}, "terms": None, "data": {}, "overrides": (),
        "heldout": 64, "samples": 2, "calibration": 16, "probe_every": 5, "save_every": 0, "keep_weights": True,
        "versions": {"python": "3.11.1", "torch": "2.13.0", "verl": "0.9.1"},
    }  # fmt: skip
    return Plan(**(values | changes))


def step_line(step: int, arm: str, rng: random.Random, world=WORLD, steps: int = 24) -> str:
    """A line of verl's file logger."""
    d, start, gain, parts = world[arm]
    noisy = [v * rng.uniform(0.9, 1.1) for v in (d, 22 * d, 120 * d)]
    data = {
        "critic/score/mean": start + gain * step / steps + rng.gauss(0, 0.03),
        "quads/logprob_abs_diff_mean": noisy[0],
        "quads/logprob_abs_diff_p99": noisy[1],
        "quads/logprob_abs_diff_max": noisy[2],
        "quads/logprob_k3_mean": noisy[0] ** 2 * 5,
        "quads/logprob_nonfinite_sum": 0.0,
        "quads/receipts_equal_min": 1.0,
        "actor/entropy": 0.15 - 0.003 * step + rng.gauss(0, 0.002),
        "actor/grad_norm": 0.7 * rng.uniform(0.8, 1.25),
        "actor/pg_clipfrac": 0.0,
        "response_length/mean": 21 + rng.gauss(0, 0.4),
        "response_length/clip_ratio": 0.0,
        "timing_s/gen": 2.2, "timing_s/old_log_prob": 0.5, "timing_s/update_actor": 1.6, "timing_s/update_weights": 0.4,
        "timing_s/step": 5.0 + 10 * (step == 1),
    }  # fmt: skip
    if arm not in ("bf16", "fp8"):
        data["quads/changed_codes_mean"] = 0.01 * rng.uniform(0.8, 1.2)
    if arm in ("quads", "quads_full"):
        data["quads/rac_energy_covered_mean"] = 0.8 if arm == "quads" else 1.0
    if step % 5 == 0:
        for name, value in zip(("weight", "act", "num"), parts, strict=True):
            data[f"quads/probe_{name}_abs_mean"] = value * rng.uniform(0.95, 1.05)
            data[f"quads/probe_{name}_abs_max"] = 50 * value
    return json.dumps({"step": step, "data": data})


def write_run(layout: Layout, plan: Plan, arm: str, seed: int, world=WORLD, done: bool = True) -> None:
    run = layout.run(arm, seed)
    run.folder.mkdir(parents=True)
    rng = random.Random(f"{arm} {seed}")
    lines = [step_line(step, arm, rng, world, plan.steps) for step in range(1, plan.steps + 1)]
    (run.folder / "metrics-1.jsonl").write_text("\n".join(lines) + "\n")
    run.log.write_text("quads: arm\n")
    if done:
        facts = {"arm": arm, "seed": seed, "attempt": 1, "code": "c0de", "seconds": 210.0, "date": "2026-01-02 03:04"}
        run.mark_done(facts | {"steps": plan.steps})


def write_evaluation(layout: Layout, plan: Plan, name: str, mode: str, ratio: float, share: float) -> None:
    layout.evaluations.mkdir(exist_ok=True)
    rng = random.Random(name)
    scores = [sum(rng.random() < share for _ in range(plan.samples)) / plan.samples for _ in range(plan.heldout)]
    found = {"name": name, "mode": mode, "ratio": ratio, "pass_at_1": sum(scores) / len(scores), "seconds": 9.0,
             "problems": plan.heldout, "samples": plan.samples, "per_problem": scores, "length": 21.0,
             "energy_covered": 0.8 if 0 < ratio < 1 else None}  # fmt: skip
    (layout.evaluations / f"{name}.json").write_text(json.dumps(found))


def write_study(folder: Path, plan: Plan | None = None, world=WORLD) -> Layout:
    """A finished study of `plan`."""
    plan, layout = plan or make_plan(), Layout(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(to_json(plan))
    for arm in plan.arms:
        _, start, gain, _ = world[arm]
        mode, _, ratio = ENGINES[arm].partition("-")
        write_evaluation(layout, plan, f"start-{ENGINES[arm]}", mode, float(ratio or 0), start)
        for seed in plan.seeds:
            write_run(layout, plan, arm, seed, world)
            write_evaluation(layout, plan, f"{arm}-seed{seed}-own", mode, float(ratio or 0), start + gain)
            if arm != "bf16":
                write_evaluation(layout, plan, f"{arm}-seed{seed}-bf16", "bf16", 0.0, 0.5 + gain)
    return layout


def about() -> dict:
    """What a study notes about itself for the report."""
    return {
        "title": "QUADS in miniature: paper-mini", "command": "quads study --preset paper-mini", "date": "2026-01-02",
        "machine": {"processor": "a processor", "cores": "2", "memory": "24 GiB", "system": "Linux x86_64"},
        "outliers": {"strength": 16.0, "norm_channels": 4, "mlp_channels": 2, "seed": 3}, "prompts_per_step": 16,
        "responses": 8, "learning_rate": 1e-4, "max_response": 40,
    }  # fmt: skip
