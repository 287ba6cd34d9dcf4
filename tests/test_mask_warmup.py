"""The number of prompts that the first step's masks come from. The run itself: tests/test_e2e.py."""

import pytest

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe.mask_warmup import wanted


def test_only_masks_that_stay_frozen_are_warmed_up():
    def of(**rollout):
        return wanted(QuadsSettings.from_dict({"arm": "quads", "rollout": rollout}))

    assert of()
    assert not of(warmup=0)
    assert not of(residual={"ratio": 1})
    assert not of(residual={"ratio": 0})
    assert not of(residual={"scope": "token"})
    assert not wanted(QuadsSettings.from_dict({"arm": "qat"}))


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_wrong_number_of_prompts(value):
    with pytest.raises(SettingsError, match="quads.rollout.warmup"):
        QuadsSettings.from_dict({"rollout": {"warmup": value}})
