"""The trainer's forward of a checkpoint, without FSDP: the actor as it trains, and the legs towards the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from quads_ops.fake_quant import convert
from quads_ops.matrix_plan import plan_parameters
from quads_ops.settings import QuadsSettings
from quads_ops.targets import Targets
from quads_recipe.analysis.cost import Shape
from quads_recipe.analysis.emulation import Emulation
from quads_recipe.analysis.gradients import InputGradients, means, random_signs
from quads_recipe.analysis.layers import LayerErrors
from quads_recipe.analysis.legs import Leg
from quads_recipe.analysis.masks import Residuals, to_device
from quads_recipe.analysis.routing import Choices, Routing
from quads_recipe.analysis.score import Batch, Sample, batches, differentiable_logprobs, logprobs
from quads_recipe.analysis.sites import experts_per_token


@dataclass
class Forward:
    """Of a list of samples."""

    logprobs: torch.Tensor
    """FP64 [response tokens], sample after sample, on the CPU."""
    choices: list[Choices] = field(default_factory=list)
    """One per batch, where asked for."""


class TrainerSide:
    """One loaded model, its actor modes and legs.

    Args:
        folder: Hugging Face checkpoint. dtype: compute dtype. settings: targets and exclude are used.

    Raises:
        quads_ops.settings.SettingsError: what `plan_parameters` refuses.
    """

    def __init__(self, folder: str, dtype: torch.dtype, settings: QuadsSettings):
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        targets = Targets(settings.targets, settings.exclude)
        plan = plan_parameters(self.model, targets)
        self.emulation = Emulation(self.model, plan, experts_per_token(self.model.config))
        self.routing = Routing(self.model)
        self.control = convert(self.model, targets, "w4a16")
        self.gradients = InputGradients(self.model, plan, self.control)
        self.plan, self._planned = plan, set(plan)

    @property
    def sites(self):
        return self.emulation.sites

    def batches(self, samples: Sequence[Sample]) -> list[Batch]:
        return list(batches(samples, self.model.config.vocab_size, self.device))

    def actor(self, samples: Sequence[Sample], mode: str, *, record: bool = False) -> Forward:
        """The training forward with `quads.actor.mode`, as the actor has it."""
        result = Forward(torch.empty(0))
        parts = []
        with self.control.use_mode(mode):
            for batch in self.batches(samples):
                self.control.start()
                parts.append(self._run(batch, result, record))
                self.control.check()
        result.logprobs = torch.cat(parts).cpu()
        return result

    def leg(
        self,
        samples: Sequence[Sample],
        leg: Leg,
        residuals: Residuals | None = None,
        *,
        spared: frozenset[str] = frozenset(),
        record: bool = False,
        replay: Sequence[Choices] | None = None,
    ) -> Forward:
        """An emulated forward. replay: the experts to use, one entry per batch of `batches(samples)`."""
        result = Forward(torch.empty(0))
        parts = []
        moved = None if residuals is None else to_device(residuals, self.device)
        with self.emulation.running(leg, moved, spared=spared):
            for i, batch in enumerate(self.batches(samples)):
                parts.append(self._run(batch, result, record, None if replay is None else replay[i]))
        result.logprobs = torch.cat(parts).cpu()
        return result

    def sensitivities(
        self, samples: Sequence[Sample], mode: str, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        """Site -> mean over tokens of the squared gradient of the logprobs, FP32 [K] or [E, K].

        mode: as `quads.actor.mode`. generator: of the random signs, on the CPU.
        """
        with self.control.use_mode(mode), self.gradients.watching() as sums:
            for batch in self.batches(samples):
                sums.valid = batch.mask.flatten()
                chosen = differentiable_logprobs(self.model, batch)
                signs = random_signs(len(chosen), generator).to(chosen)
                self.gradients.backward((chosen * signs).sum())
        return means(sums.by_site(self.device))

    def layer_errors(self, samples: Sequence[Sample], residuals: dict[float, Residuals]) -> LayerErrors:
        """Errors of every site, by ratio, on the forward with NVFP4 weights."""
        errors = LayerErrors({ratio: to_device(r, self.device) for ratio, r in residuals.items()})
        with self.emulation.running(Leg("nvfp4"), observer=errors):
            for batch in self.batches(samples):
                errors.valid = batch.mask.flatten()
                logprobs(self.model, batch)
        return errors

    def shape(self) -> Shape:
        """The model's matrix products. Embeddings multiply nothing; a tied head does."""
        flops = elements = 0
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            router = name in self.routing.routers
            if isinstance(weight, torch.Tensor) and (isinstance(module, torch.nn.Linear) or router):
                if f"{name}.weight" not in self._planned:
                    flops += 2 * weight.numel()
                    elements += weight.numel()
        per_token = experts_per_token(self.model.config)
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 3 and name not in self._planned:
                flops += 2 * parameter.numel() // parameter.shape[0] * per_token
                elements += parameter.numel()
        return Shape(self.sites, flops, elements)

    def _run(self, batch: Batch, result: Forward, record: bool, replay: Choices | None = None) -> torch.Tensor:
        with ExitStack() as stack:
            if replay is not None:
                stack.enter_context(self.routing.replayed(replay))
            if record:
                result.choices.append(stack.enter_context(self.routing.recorded()))
            return logprobs(self.model, batch)
