"""A layout for tensorboard's page Custom Scalars: what belongs together in one chart, and the arms side by side.

A chart draws its tags for every run that is selected. So the charts with one tag each compare runs, and every run's own
event file holds the same layout: tensorboard merges them, and `tensorboard --logdir` shows it for one run and for a
folder of runs alike.
"""

from __future__ import annotations

from pathlib import Path

ARMS = "QUADS: arms side by side"
RUN = "QUADS: one run"
SUFFIX = ".quads_layout"

_ARMS = {
    "reward": "critic/score/mean",
    "mean |d|, nats": "quads/logprob_abs_diff_mean",
    "99th percentile of |d|, nats": "quads/logprob_abs_diff_p99",
    "largest |d|, nats": "quads/logprob_abs_diff_max",
    "KL(rollout || actor), nats": "quads/logprob_k3_mean",
    "mean |d_weight|, nats": "quads/probe_weight_abs_mean",
    "mean |d_act|, nats": "quads/probe_act_abs_mean",
    "mean |d_num|, nats": "quads/probe_num_abs_mean",
    "entropy, nats": "actor/entropy",
    "gradient norm": "actor/grad_norm",
    "response length, tokens": "response_length/mean",
    "step, s": "timing_s/step",
}
_TIMES = ("gen", "old_log_prob", "probe", "sensitivity", "update_actor", "update_weights")
_RUN = {
    "reward": ["critic/score/mean"],
    "|d|, nats": [f"quads/logprob_abs_diff_{name}" for name in ("mean", "p99", "max")],
    "parts of d: mean, nats": [f"quads/probe_{part}_abs_mean" for part in ("d", "weight", "act", "num")],
    "parts of d: share of variance": [f"quads/probe_{part}_variance_share" for part in ("weight", "act", "num")],
    "KL(rollout || actor), nats": ["quads/logprob_k3_mean"],
    "alarms": ["quads/alarms_sum", "quads/logprob_nonfinite_sum"],
    "residual compensation": [f"quads/rac_{name}_mean" for name in ("energy_covered", "mask_moved", "from_prior")],
    "residual compensation: ratio of the layers": [f"quads/rac_ratio_{name}" for name in ("min", "mean", "max")],
    "changed NVFP4 codes": ["quads/changed_codes_mean"],
    "weight sync, s": ["quads/sync_seconds_max", "quads/requantize_seconds_max"],
    "layers: error of activations, by kind": [r"quads/layers_\w+_act_error_mean"],
    "layers: error of weights, by kind": [r"quads/layers_\w+_weight_error_mean"],
    "time, s": [f"timing_s/{name}" for name in _TIMES],
}


def layout() -> dict[str, dict[str, list]]:
    """Category -> chart -> ["Multiline", patterns], as `SummaryWriter.add_custom_scalars` takes it.

    tensorboard takes a tag for a regular expression that matches from its beginning, so each one ends with `$`.
    """
    arms = {title: ["Multiline", [f"{tag}$"]] for title, tag in _ARMS.items()}
    run = {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in _RUN.items()}
    return {ARMS: arms, RUN: run}


def write_folder(folder: Path) -> Path:
    """Gives a folder the layout whose runs were logged without it: an event file of its own, run `.` in tensorboard.

    Does nothing if it is there already. Returns the file.
    """
    from torch.utils.tensorboard import SummaryWriter

    for file in sorted(folder.glob(f"events.out.tfevents.*{SUFFIX}")):
        return file
    with SummaryWriter(str(folder), filename_suffix=SUFFIX) as writer:
        writer.add_custom_scalars(layout())
    return next(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
