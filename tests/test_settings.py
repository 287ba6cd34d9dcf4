"""The settings block: arms, overrides, and one clear error per wrong value."""

import pytest

from quads_ops.settings import ARMS, QuadsSettings, SettingsError


@pytest.mark.parametrize("arm", ARMS)
def test_arm_sets_the_papers_combination(arm):
    settings = QuadsSettings.from_dict({"arm": arm})
    assert (settings.actor.mode, settings.rollout.mode, settings.rollout.residual.ratio) == ARMS[arm]


@pytest.mark.parametrize("arm", ARMS)
def test_round_trip(arm):
    settings = QuadsSettings.from_dict({"arm": arm, "exclude": ["re:.*o_proj"], "targets": ["a.b", "re:c"]})
    assert QuadsSettings.from_dict(settings.to_dict()) == settings


def test_defaults_are_the_arm_quads():
    assert QuadsSettings.from_dict({}) == QuadsSettings.from_dict({"arm": "quads"})


def test_single_fields_override_the_arm():
    block = {"arm": "quads", "actor": {"mode": "none"}, "rollout": {"residual": {"ratio": 0.25, "scope": "token"}}}
    settings = QuadsSettings.from_dict(block)
    assert settings.actor.mode == "none"
    assert settings.rollout.mode == "w4a4"
    assert (settings.rollout.residual.ratio, settings.rollout.residual.scope) == (0.25, "token")


def test_ratio_of_the_arm_does_not_outlive_its_mode():
    settings = QuadsSettings.from_dict({"arm": "quads", "rollout": {"mode": "w4a16"}})
    assert settings.rollout.residual.ratio == 0


def test_null_fields_mean_the_default():
    block = {"arm": "qat", "targets": None, "actor": {"mode": None}, "rollout": {"mode": None, "residual": None}}
    assert QuadsSettings.from_dict(block) == QuadsSettings.from_dict({"arm": "qat"})


def test_gradients_are_measured_where_masks_depend_on_them():
    def measures(**residual):
        return QuadsSettings.from_dict({"arm": "quads", "rollout": {"residual": residual}}).measures_gradients

    assert measures(score="sensitivity") and measures(score="sensitivity", allocation="sensitivity")
    assert not measures() and not measures(score="weighted")
    assert not measures(score="sensitivity", ratio=0.0) and not measures(score="sensitivity", ratio=1.0)


def test_a_budget_over_all_layers_is_refused_where_kernels_multiply():
    both = {"score": "sensitivity", "allocation": "sensitivity"}
    for residual, fits in (({**both, "ratio": 1.0}, True), ({"score": "sensitivity"}, True), (both, False)):
        settings = QuadsSettings.from_dict({"rollout": {"residual": residual}}).rollout.residual
        if fits:
            settings.require_kernels()
            continue
        with pytest.raises(SettingsError, match="residual.allocation = 'sensitivity': runs on a CPU only.*uniform"):
            settings.require_kernels()


WRONG = [
    ({"arm": "nvfp4"}, "quads.arm", "nvfp4"),
    ({"arms": "quads"}, "quads.arms", "no such setting"),
    ({"actor": {"mode": "w8a8"}}, "quads.actor.mode", "w8a8"),
    ({"actor": "w4a16"}, "quads.actor", "mapping"),
    ({"rollout": {"mode": "int8"}}, "quads.rollout.mode", "int8"),
    ({"rollout": {"residual": {"ratio": -0.1}}}, "quads.rollout.residual.ratio", "-0.1"),
    ({"rollout": {"residual": {"ratio": 1.01}}}, "quads.rollout.residual.ratio", "1.01"),
    ({"rollout": {"residual": {"ratio": "half"}}}, "quads.rollout.residual.ratio", "half"),
    ({"rollout": {"residual": {"ratio": float("nan")}}}, "quads.rollout.residual.ratio", "nan"),
    ({"rollout": {"residual": {"granularity": "tensor"}}}, "quads.rollout.residual.granularity", "block, channel"),
    ({"rollout": {"residual": {"scope": "batch"}}}, "quads.rollout.residual.scope", "step, token"),
    ({"rollout": {"residual": {"score": "hessian"}}}, "quads.rollout.residual.score", "residual, weighted"),
    ({"rollout": {"residual": {"scope": "token", "score": "weighted"}}}, "quads.rollout.residual.score", "weighted"),
    ({"rollout": {"residual": {"scope": "token", "score": "sensitivity"}}}, "quads.rollout.residual.score", "residual"),
    ({"rollout": {"residual": {"allocation": "global"}}}, "quads.rollout.residual.allocation", "uniform, sensitivity"),
    (
        {"rollout": {"residual": {"allocation": "sensitivity"}}},
        "quads.rollout.residual.allocation",
        "set quads.rollout.residual.score=sensitivity too (it is residual)",
    ),
    ({"sensitivity": {"every": 0}}, "quads.sensitivity.every", "1 or more"),
    ({"sensitivity": {"sequences": 0}}, "quads.sensitivity.sequences", "1 or more"),
    ({"sensitivity": {"ema": 1.0}}, "quads.sensitivity.ema", "below 1"),
    ({"sensitivity": {"ratio": 1.0}}, "quads.sensitivity.ratio", "no such setting"),
    ({"rollout": {"residual": {"ema": 1.0}}}, "quads.rollout.residual.ema", "below 1"),
    ({"arm": "bf16", "rollout": {"residual": {"ratio": 0.5}}}, "quads.rollout.residual.ratio", "w4a4"),
    ({"group_size": 32}, "quads.group_size", "16"),
    ({"targets": "moe"}, "quads.targets", "all_linear, experts"),
    ({"targets": []}, "quads.targets", "arm bf16"),
    ({"targets": [3]}, "quads.targets", "non-empty string"),
    ({"exclude": "lm_head"}, "quads.exclude", "list"),
    ({"probe": {"every": -1}}, "quads.probe.every", "0 or more"),
    ({"probe": {"sequences": 0}}, "quads.probe.sequences", "1 or more"),
    ({"sync_timeout_s": 0}, "quads.sync_timeout_s", "3600"),
]


@pytest.mark.parametrize(("block", "field", "part"), WRONG, ids=[f"{w[1]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_values_name_field_value_and_remedy(block, field, part):
    with pytest.raises(SettingsError) as caught:
        QuadsSettings.from_dict(block)
    assert str(caught.value).startswith(field + " = ")
    assert part in str(caught.value)
