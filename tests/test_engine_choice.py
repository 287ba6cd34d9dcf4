"""verl chooses the engine by device and vendor; a worker of QUADS takes no other than ours."""

import pytest


def test_another_vendor_is_an_error_before_the_model_is_loaded(monkeypatch):
    from quads_recipe.worker import _require_our_engine

    for strategy in ("fsdp", "fsdp2"):
        _require_our_engine(strategy)
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    _require_our_engine("fsdp2")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "amd")
    with pytest.raises(RuntimeError, match="verl takes FSDPEngineWithLMHead here .*unset it"):
        _require_our_engine("fsdp2")
