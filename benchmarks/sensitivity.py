"""What masks by the trainer's gradients buy, with the real engine: mean and p99 |d_act| at equal cost.

    python benchmarks/sensitivity.py [--model natural] [--ratios 0.25,0.5] [--dtype fp32] [--scores]

The engine answers `--calibration` held-out problems; masks are chosen from that, and gradients measured on the first
`--gradients` of these responses. Then it answers `--prompts` other problems at ratio 1, and scores those tokens with
each kind of mask. d_act is what activation quantization does to the trainer's own forward with the engine's masks (as
in `quads diagnose`), |d| the engine's logprobs against the actor's. Cost: FLOPs of the residual's products, as a share
of those of ratio 1. The change is against uniform masks by residual, on the same tokens, with its standard error.

--scores: in the trainer's forward alone, what three ways to score a block are worth with one budget: the mean of
(r g)^2 itself; the product of the means of r^2 and g^2 of each channel, which takes r and g for independent; and that
of the block's mean r^2 with its mean g^2, which is what the rollout has.
"""

import argparse
from functools import partial

import torch
from transformers import AutoTokenizer

from quads_ops.nvfp4 import qdq
from quads_ops.residual import ResidualMask, token_scale
from quads_ops.residual_budget import Demand, spend
from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.decompose import mean_and_error, quantile
from quads_recipe.analysis.gradients import InputGradients, random_signs
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.masks import ExpertMasks
from quads_recipe.analysis.prompts import tokenize
from quads_recipe.analysis.rollout_engine import EngineOptions, RolloutEngine
from quads_recipe.analysis.score import differentiable_logprobs
from quads_recipe.analysis.trainer_side import TrainerSide
from quads_recipe.diagnose_run import stop_tokens
from quads_recipe.paths import policy_dir

KINDS = (("residual", "uniform"), ("weighted", "uniform"), ("sensitivity", "uniform"), ("sensitivity", "sensitivity"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NVFP4 = Leg("nvfp4", "nvfp4", compensated=True)
MAX_NEW = 40


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    folder = str(policy_dir(args.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = held_out(tokenizer, args.prompts + args.calibration)
    settings = QuadsSettings.from_dict({"arm": "quads"})
    dtype = str(DTYPES[args.dtype]).removeprefix("torch.")
    options = EngineOptions(folder, dtype, max(map(len, prompts)) + MAX_NEW + 1, stop_tokens(folder, tokenizer))
    trainer = TrainerSide(folder, DTYPES[args.dtype], settings)
    with RolloutEngine(options, settings) as engine:
        calibration = [g.sample for g in engine.generate(prompts[args.prompts :], MAX_NEW, 1_000_000)]
        engine.choose_masks()
        signs = torch.Generator().manual_seed(args.seed)
        engine.set_sensitivity(trainer.sensitivities(calibration[: args.gradients], "w4a16", signs))
        engine.set_residual(1.0)
        samples = [g.sample for g in engine.generate(prompts[: args.prompts], MAX_NEW, args.seed)]
        tokens = sum(len(s.response) for s in samples)
        print(f"{args.model}, {args.dtype}, {tokens} tokens of {len(samples)} responses, gradients of {args.gradients}")
        if args.scores:
            scores(trainer, calibration, samples, args.ratios)
        else:
            masks(trainer, engine, samples, args.ratios)


def masks(trainer: TrainerSide, engine: RolloutEngine, samples: list, ratios: list[float]) -> None:
    """The engine's masks of every kind."""
    weights = trainer.leg(samples, Leg("nvfp4")).logprobs
    sequence = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(s.response) for s in samples]))
    print("ratio  score       allocation    cost   layers        mean |d_act|        p99     change           mean |d|")
    for ratio in (0.0, *ratios, 1.0):
        base = None
        for score, allocation in KINDS if 0 < ratio < 1 else KINDS[:1]:
            found = engine.set_residual(ratio, score, allocation)
            reported = torch.tensor([value for g in engine.score(samples) for value in g.logprobs], dtype=torch.float64)
            size = (trainer.leg(samples, NVFP4, engine.residuals()).logprobs - weights).abs()
            mean, error = mean_and_error(size, sequence)
            base = size if base is None else base
            least, most = found["ratio_min"], found["ratio_max"]
            layers = "" if least is None else f"{least:.2f} to {most:.2f}"
            cost = ratio if found["cost"] is None else found["cost"]
            print(
                f"{ratio:<5}  {score:11} {allocation:12} {cost:6.3f}  {layers:12}  {mean:.5f} +- {error:.5f}"
                f"  {quantile(size, 0.99):.4f}  {change(size, base, sequence):15}"
                f"  {(reported - weights).abs().mean():.5f}",
                flush=True,
            )


def change(size: torch.Tensor, base: torch.Tensor, sequence: torch.Tensor) -> str:
    """Relative change of the mean, with the standard error of a ratio on the same tokens."""
    if base is size or not base.mean():
        return ""
    ratio = size.mean() / base.mean()
    _, error = mean_and_error(size - ratio * base, sequence)
    return f"{100 * (ratio - 1):+.1f} +- {100 * error / base.mean():.1f}%"


# -- the scores


class Joint(InputGradients):
    """Also keeps, per input and expert, the sums over tokens of r^2, g^2 and (r g)^2: FP64 [3, K], and the tokens."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found: dict[tuple, list] = {}

    def _seen(self, site, expert, valid, x):
        watched = super()._seen(site, expert, valid, x)
        rows = x.detach().flatten(0, -2).float()
        watched.register_hook(partial(self._add, (site.name, expert), valid, rows - qdq(rows, token_scale(rows))))
        return watched

    def _add(self, key, valid, r, g) -> None:
        r, g = r[valid].double(), g.flatten(0, -2)[valid].double()
        sums = torch.stack([r.square().sum(0), g.square().sum(0), (r * g).square().sum(0)])
        entry = self.found.setdefault(key, [torch.zeros_like(sums), 0])
        entry[0] += sums
        entry[1] += int(valid.sum())


def scores(trainer: TrainerSide, calibration: list, samples: list, ratios: list[float]) -> None:
    """Masks of the three scores, all from the trainer's forward on the same responses."""
    joint = Joint(trainer.model, trainer.plan, trainer.control)
    generator = torch.Generator().manual_seed(0)
    with joint.watching() as sums:
        for batch in trainer.batches(calibration):
            sums.valid = batch.mask.flatten()
            chosen = differentiable_logprobs(trainer.model, batch)
            joint.backward((chosen * random_signs(len(chosen), generator).to(chosen)).sum())
    weights = trainer.leg(samples, Leg("nvfp4")).logprobs
    for ratio in ratios:
        for name, of in SCORES.items():
            d_act = trainer.leg(samples, NVFP4, budgeted(trainer.sites, joint.found, of, ratio)).logprobs - weights
            print(
                f"ratio {ratio}, {name:32} mean |d_act| {d_act.abs().mean():.5f}, p99 {quantile(d_act.abs(), 0.99):.4f}"
            )


def blocks(by_channel: torch.Tensor) -> torch.Tensor:
    return by_channel.unflatten(-1, (-1, 16)).sum(-1)


SCORES = {
    "E[(r g)^2]": lambda r, g, both: blocks(both),
    "E[r^2] E[g^2] of channels": lambda r, g, both: blocks(r * g),
    "E[r^2] E[g^2] of blocks (engine)": lambda r, g, both: blocks(r) * blocks(g) / 16,
}


def budgeted(sites: dict, found: dict, score, ratio: float) -> dict:
    """Site -> mask, of one budget over all of them."""
    keys = {name: [key for key in sorted(found, key=str) if key[0] == name] for name in sites}
    demands = []
    for name, site in sites.items():
        means = [found[key][0] / found[key][1] for key in keys[name]]
        traffic = torch.tensor([float(found[key][1]) for key in keys[name]])
        uses = site.experts_per_token if len(means) == 1 else 1
        demands.append(Demand(torch.stack([score(*mean) for mean in means]), site.n * uses, traffic))
    result = {}
    for (name, site), keep in zip(sites.items(), spend(demands, ratio), strict=True):
        if site.experts and name.endswith(".down_proj"):
            whole = torch.zeros(site.experts, site.k // 16, dtype=torch.bool)
            whole[[key[1] for key in keys[name]]] = keep
            result[name] = ExpertMasks(whole)
        else:
            result[name] = ResidualMask(blocks=keep[0])
    return result


# -- prompts


def held_out(tokenizer, count: int) -> list[list[int]]:
    from quads_recipe.policy.task import chat, problems

    return tokenize([chat(p.prompt) for p in problems("heldout", count)], tokenizer)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="natural", help="natural, outlier or a checkpoint folder")
    p.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default=[0.25, 0.5])
    p.add_argument("--dtype", choices=DTYPES, default="fp32")
    p.add_argument("--prompts", type=int, default=512)
    p.add_argument("--calibration", type=int, default=256)
    p.add_argument("--gradients", type=int, default=32, help="sequences, as quads.sensitivity.sequences")
    p.add_argument("--seed", type=int, default=0, help="of sampling and of the random signs")
    p.add_argument("--scores", action="store_true")
    return p


if __name__ == "__main__":
    main()
