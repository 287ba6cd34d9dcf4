"""What the probe in training and the gradients of `quads.sensitivity` cost, in forwards of the sequences looked at.

    python benchmarks/probe_cost.py [--model natural] [--sequences 32] [--rounds 7]

CPU time of one thread, the least of the rounds, for each forward of the probe on random responses: the actor's (w4a16),
the legs with the rollout's weights and activations (half of the blocks compensated), the one of `quads.probe.layers`,
which computes every product again in FP32, and the forward and backward pass for gradients of quantized inputs. Without
verl's transfer of the batch.
"""

import argparse
import time

import torch

from quads_ops.residual import ResidualMask
from quads_ops.settings import QuadsSettings
from quads_recipe.analysis import masks
from quads_recipe.analysis.layers import LayerErrors
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.score import Sample, logprobs
from quads_recipe.analysis.trainer_side import TrainerSide
from quads_recipe.paths import policy_dir

PROMPT, RESPONSE = 12, 20
"""Tokens, as in the demo."""


def cpu_seconds(run, rounds: int) -> float:
    """The least CPU time of `run()` in this process."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def half(site) -> ResidualMask | masks.ExpertMasks:
    """Every other block of a site's input."""
    keep = torch.arange(site.k // 16) % 2 == 0
    if site.experts and site.name.endswith(".down_proj"):
        return masks.ExpertMasks(keep.expand(site.experts, -1).clone())
    return ResidualMask(blocks=keep)


def layers(trainer: TrainerSide, samples: list[Sample], residuals: dict[float, masks.Residuals]) -> None:
    """As quads_recipe.probe_layers: without what FP8 would do."""
    errors = LayerErrors(residuals, fp8=False)
    with trainer.emulation.running(Leg("nvfp4"), observer=errors):
        for batch in trainer.batches(samples):
            errors.valid = batch.mask.flatten()
            logprobs(trainer.model, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="natural", help="natural, outlier or a checkpoint folder")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = TrainerSide(str(policy_dir(args.model)), torch.bfloat16, QuadsSettings())
    ids = torch.randint(0, trainer.model.config.vocab_size, (args.sequences, PROMPT + RESPONSE)).tolist()
    samples = [Sample(tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in ids]
    masked = {site.name: half(site) for site in trainer.sites.values()}
    plain = masks.uniform(trainer.sites, None)
    forwards = {
        "actor": lambda: trainer.actor(samples, "w4a16"),
        "weights": lambda: trainer.leg(samples, Leg("nvfp4")),
        "activations": lambda: trainer.leg(samples, Leg("nvfp4", "nvfp4", compensated=True), masked),
        "gradients": lambda: trainer.sensitivities(samples, "w4a16", torch.Generator().manual_seed(0)),
        "layers": lambda: layers(trainer, samples, {0.0: plain, 0.5: masked}),
    }
    seconds = {name: cpu_seconds(run, args.rounds) for name, run in forwards.items()}
    print(f"{args.model}, {args.sequences} sequences of {PROMPT + RESPONSE} tokens, bf16, one thread")
    for name, value in seconds.items():
        print(f"{name:12} {1000 * value:7.1f} ms  {value / seconds['actor']:5.2f} forwards of the actor")


if __name__ == "__main__":
    main()
