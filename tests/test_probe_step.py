"""What the probe takes of a step: the rollout's masks, put where the actor computes, and its share of sequences."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from test_probe_layers import reported

from quads_ops.settings import QuadsSettings


def test_masks_lie_where_the_actor_computes_not_where_offloaded_parameters_wait(monkeypatch):
    from quads_recipe import probe
    from quads_recipe.analysis.sites import Site

    monkeypatch.setattr(probe, "get_device_id", lambda: "meta")  # stands for a GPU; the parameters are on the CPU
    settings = QuadsSettings.from_dict({"arm": "quads"})
    forwards = probe.ProbeForwards(SimpleNamespace(settings=settings, plan={}, module=torch.nn.Linear(2, 2)))
    attention = Site("model.layers.0.self_attn.o_proj", ("w",), ("m",), 64, 48)
    forwards.set_masks(reported({attention.name: attention}))
    [residual] = forwards._residuals.values()
    assert residual.flags.device.type == "meta"


@pytest.mark.parametrize(
    ("sequences", "ranks", "micro", "rows"),
    [(32, 8, 16, 32), (32, 5, 4, 20), (32, 64, 16, 64), (4, 8, 16, 8), (200, 8, None, 96), (32, 128, 16, None)],
)
def test_sequences_are_shared_by_the_ranks(sequences, ranks, micro, rows):
    """Of 100, four of which are padding; more ranks than sequences asked for look at one each."""
    from quads_recipe import probe

    batch = SimpleNamespace(keys=list(range(100)), tags=[{"is_padding": key % 25 == 0} for key in range(100)])
    batch.select_keys = lambda keys: SimpleNamespace(keys=keys, extra_info={})
    rollout = {"temperature": 1.0, "log_prob_use_dynamic_bsz": not micro, "log_prob_micro_batch_size_per_gpu": micro}
    part = probe.part_of(batch, sequences, ranks, OmegaConf.create(rollout))
    assert (part and len(part.keys)) == rows
    assert part is None or not any(key % 25 == 0 for key in part.keys)
