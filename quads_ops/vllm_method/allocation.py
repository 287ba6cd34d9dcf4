"""Residual masks of all layers: each by itself, or by one budget of FLOPs over all layers and all workers."""

from __future__ import annotations

import torch

from quads_ops.residual_budget import Demand, spend
from quads_ops.vllm_method import compat_vllm
from quads_ops.vllm_method.compensation import RollReport
from quads_ops.vllm_method.projection import Projection, projections


class MaskChoiceError(ValueError):
    """No masks can be chosen; the message names worker and layer. Every worker raises it."""


def choose_masks(model: torch.nn.Module, report: RollReport) -> RollReport:
    """Choose all masks from what the layers know. A collective. Returns the sums over all workers.

    report: what this worker has to add to them.

    Raises:
        MaskChoiceError: on every worker, statistics of one of them that are not finite.
    """
    allocated = shared_budget(model)
    problem = None
    for projection in projections(model):
        try:
            report += _chosen(projection, allocated.get(projection))
        except ValueError as error:  # after the collective below, or the other workers would wait
            problem = problem or str(error)
    total = RollReport()
    for worker in _from_all((report, problem)):
        total += worker
    return total


def shared_budget(model: torch.nn.Module) -> dict[Projection, torch.Tensor]:
    """Projection -> bool [masks, entries], where one budget is shared; nothing before there are gradients.

    Workers that share a mask must choose it alike, so all of them compute the whole model's budget. A collective.

    Raises:
        MaskChoiceError: as in `choose_masks`.
    """
    frozen = [p for p in projections(model) if p.compensation is not None and p.compensation.frozen]
    if not frozen or not all(_budgeted(projection) for projection in frozen):
        return {}
    demands, problem = [], None
    try:
        demands = [_on_cpu(projection.compensation.demand()) for projection in frozen]
    except ValueError as error:
        problem = str(error)
    demands_of_workers = _from_all((demands, problem))
    rank = compat_vllm.get_tensor_model_parallel_rank()
    # A mask that all workers share is asked for once, by the first of them.
    asked = [
        (worker, index)
        for worker, offered in enumerate(demands_of_workers)
        for index in range(len(offered))
        if worker == 0 or not frozen[index].shared_mask
    ]
    ratio = frozen[0].compensation.settings.ratio
    masks = spend([demands_of_workers[worker][index] for worker, index in asked], ratio)
    chosen = dict(zip(asked, masks, strict=True))
    return {p: chosen[0 if p.shared_mask else rank, index] for index, p in enumerate(frozen)}


def _budgeted(projection: Projection) -> bool:
    compensation = projection.compensation
    return compensation.settings.allocation == "sensitivity" and compensation.sensitive


def _on_cpu(demand: Demand) -> Demand:
    return Demand(demand.score.cpu(), demand.width, demand.traffic.cpu())


def _chosen(projection: Projection, allocated: torch.Tensor | None) -> RollReport:
    report = projection.choose(allocated)
    if projection.shared_mask:  # every worker reports its cost, which is that of all of them
        workers = compat_vllm.get_tensor_model_parallel_world_size()
        report.spent, report.cost = report.spent / workers, report.cost / workers
    return report


def _from_all(outcome: tuple[object, str | None]) -> list:
    """The first part of every worker's outcome, unless one has a problem."""
    outcomes = compat_vllm.tp_gather(outcome)
    problems = [f"worker {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text is not None]
    if problems:
        raise MaskChoiceError(f"no residual mask can be chosen ({'; '.join(problems)})")
    return [result for result, _ in outcomes]
