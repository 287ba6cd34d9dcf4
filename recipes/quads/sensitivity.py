"""The gradients behind residual score `sensitivity`, measured in training and sent with the weights.

Every `quads.sensitivity.every` steps, before the update, one forward and backward pass of the actor over some of the
step's own rollouts (`quads_recipe.analysis.gradients`) gives the squared gradient of the logprobs by every quantized
input. Each rank keeps the same moving average; the next weight syncs carry it to the rollout.

Nothing else of training changes: no parameter gets a gradient, and the random signs have their own generator.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from transfer_queue import KVBatchMeta
from verl.utils.device import get_device_id
from verl.workers.utils.padding import response_from_nested

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.gradients import InputGradients, Squares, means, random_signs
from quads_recipe.probe import LEG_FIELD
from quads_recipe.probe_layers import telling_padding

LEG = "gradients"
"""Value of `LEG_FIELD`: the forward with a backward pass."""


class Sensitivity:
    """The worker's side.

    Args:
        engine: the initialized QuadsFSDPEngine.
    """

    def __init__(self, engine):
        self._engine = engine
        self._gradients = InputGradients(engine.module, engine.plan, engine.fake_quant)
        # The ranks of one sequence parallel group see the same logprobs, and must give them the same signs.
        self._signs = torch.Generator().manual_seed(engine.get_data_parallel_rank())
        self._sums = None

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Forwards of the engine within it (`infer_batch`) are followed by the backward pass."""
        engine = self._engine
        with ExitStack() as stack:
            self._sums = stack.enter_context(self._gradients.watching())
            stack.enter_context(telling_padding(engine, self._sums))
            stack.enter_context(_frozen_flat_parameters(engine.module))
            stack.enter_context(self._backward_after_forward())
            yield

    @contextmanager
    def _backward_after_forward(self) -> Iterator[None]:
        engine, step = self._engine, self._engine.forward_step

        def forward_step(micro_batch, loss_function, forward_only):
            with torch.enable_grad(), _checkpointing(engine.module):
                loss, output = step(micro_batch, loss_function=self._signed_sum, forward_only=forward_only)
                self._gradients.backward(loss)
            return loss.detach(), output

        engine.forward_step = forward_step  # of this object, for the time of the measurement
        try:
            yield
        finally:
            del engine.forward_step

    def _signed_sum(self, model_output, data, dp_group=None) -> tuple[torch.Tensor, dict]:
        """sum over response tokens of s_t logp_t, in the shape of a loss of verl."""
        mask = data["response_mask"]
        logprobs = response_from_nested(model_output["log_probs"], mask).values()[mask.values().bool()]
        signs = random_signs(logprobs.numel(), self._signs).to(logprobs.device)
        return (logprobs.float() * signs).sum(), {}

    def update(self) -> dict[str, float]:
        """Fold what was measured since into `engine.sensitivities`, over all ranks. A collective.

        Returns this rank's `quads/sensitivity_*` metrics.

        Raises:
            quads_recipe.analysis.gradients.GradientError: on every rank; names an input without gradients.
        """
        engine, by_site = self._engine, self._sums.by_site(torch.device(get_device_id()))
        self._sums = None
        _sum_over_ranks(by_site)
        new, old = means(by_site), engine.sensitivities or {}
        ema = engine.settings.sensitivity.ema
        engine.sensitivities = {
            name: torch.lerp(vector, old[name], ema) if name in old else vector for name, vector in new.items()
        }
        unseen = sum(int((of.tokens == 0).sum()) for of in by_site.values() if of.tokens.dim())
        tokens = max(float(of.tokens) for of in by_site.values() if not of.tokens.dim())
        return {"quads/sensitivity_tokens_max": tokens, "quads/sensitivity_experts_unseen_max": float(unseen)}


def due(settings: QuadsSettings, step: int, first: bool) -> bool:
    """Whether this step measures. first: none of this run has yet."""
    return settings.measures_gradients and (first or step % settings.sensitivity.every == 0)


def run(worker_group, part: KVBatchMeta) -> list[dict[str, float]]:
    """Measure on `part` (see `quads_recipe.probe.part_of`). Returns every rank's `quads/sensitivity_*` metrics."""
    start = time.monotonic()
    part.extra_info[LEG_FIELD] = LEG
    worker_group.compute_leg_log_prob(part)
    ranks = worker_group.update_sensitivities()
    return [*ranks, {"quads/sensitivity_seconds_max": time.monotonic() - start}]


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Let layers recompute their activations in backward where training does, though the model is in eval mode.

    Only the layers themselves are told: their parts stay as in any other forward without an update, without dropout.
    """
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and not m.training]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def _frozen_flat_parameters(model: nn.Module) -> Iterator[None]:
    """FSDP1 frees gathered parameters that need a gradient only when they get it; the others after their layer.

    Their gradients are put aside: before a backward pass it sets them aside too, and brings them back only where one is
    needed.
    """
    flat = [(p, p.grad) for p in model.parameters() if isinstance(p, FlatParameter) and p.requires_grad]
    for parameter, _ in flat:
        parameter.requires_grad_(False)
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in flat:
            parameter.requires_grad_(True)
            parameter.grad = gradient


def _sum_over_ranks(by_site: dict[str, Squares]) -> None:
    """In place, in one collective. Data parallel ranks saw other sequences, sequence parallel ones other tokens."""
    tensors = [tensor for of in by_site.values() for tensor in (of.sums, of.tokens)]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
