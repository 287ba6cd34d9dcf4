"""Options of the quantization method quads_nvfp4: what is refused, and which layers get which method."""

from types import SimpleNamespace

import pytest
from support_models import tiny_config

pytest.importorskip("vllm")

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402

from quads_ops import vllm_plugin  # noqa: E402
from quads_ops.settings import SettingsError  # noqa: E402
from quads_ops.vllm_method import config as config_module  # noqa: E402
from quads_ops.vllm_method import names  # noqa: E402
from quads_ops.vllm_method.config import QuadsNvfp4Config  # noqa: E402
from quads_ops.vllm_method.linear import QuadsLinearMethod  # noqa: E402


def linear(parts: int) -> LinearBase:
    layer = LinearBase.__new__(LinearBase)
    # Attributes that vLLM sets before it asks for the method.
    object.__setattr__(layer, "output_partition_sizes", [16] * parts)
    return layer


def configured(**options) -> QuadsNvfp4Config:
    config = QuadsNvfp4Config(options)
    config._table = names.table_for("qwen3_moe")
    return config


def test_registered_by_the_plugin():
    vllm_plugin.register()
    vllm_plugin.register()
    assert get_quantization_config("quads_nvfp4") is QuadsNvfp4Config


def test_without_options_it_is_arm_quads():
    config = QuadsNvfp4Config()
    assert (config.rollout.mode, config.rollout.residual.ratio) == ("w4a4", 0.5)
    assert "mode w4a4, residual ratio 0.5 (block, step, residual); targets all_linear" in config.describe()


def test_settings_survive_the_way_through_vllm():
    block = {
        "targets": ["re:.*experts"],
        "exclude": [],
        "rollout": {"mode": "w4a4", "residual": {"ratio": 0.25, "granularity": "channel", "ema": 0.75}},
    }
    from quads_ops.settings import QuadsSettings

    settings = QuadsSettings.from_dict(block)
    config = QuadsNvfp4Config.from_config(settings.vllm_quantization_config())
    assert config.rollout == settings.rollout
    assert config.settings.targets == settings.targets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modus": "w4a4"}, "quantization_config.modus = 'w4a4': no such option"),
        ({"mode": "int4"}, "quads.rollout.mode = 'int4': must be one of bf16, fp8, w4a16, w4a4"),
        ({"residual": {"ratio": 1.5}}, r"quads.rollout.residual.ratio = 1.5: must be in \[0, 1\]"),
        ({"residual": {"ratios": 0.5}}, "quads.rollout.residual.ratios"),
        ({"mode": "w4a16", "residual": {"ratio": 0.5}}, "needs quads.rollout.mode=w4a4"),
        ({"group_size": 32}, "quads.group_size = 32: NVFP4 has blocks of 16"),
        ({"targets": "everything"}, "quads.targets = 'everything'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(SettingsError, match=message):
        QuadsNvfp4Config.from_config({"quant_method": "quads_nvfp4", **options})


def test_patterns_are_checked_against_the_model():
    hf_config = tiny_config("qwen3_moe")
    hf_config.quantization_config = {"quant_method": "quads_nvfp4"}
    QuadsNvfp4Config(
        {"targets": ["re:.*self_attn.*"], "exclude": ["model.layers.0.self_attn.o_proj"]}
    ).maybe_update_config("tiny", hf_config=hf_config)
    for options in ({"targets": ["model.layers.0.self_attn.qkv_proj"]}, {"exclude": ["re:.*gate_up_proj"]}):
        with pytest.raises(SettingsError, match="matches no module"):
            QuadsNvfp4Config(options).maybe_update_config("tiny", hf_config=hf_config)


def test_layers_and_their_methods():
    config = configured(mode="w4a16")
    method = config.get_quant_method(linear(3), "model.layers.0.self_attn.qkv_proj")
    assert isinstance(method, QuadsLinearMethod)
    assert method.matrices == tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
    for never in ("model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate", "lm_head"):
        assert isinstance(config.get_quant_method(linear(1), never), UnquantizedLinearMethod)
    unquantized = configured(mode="bf16")
    assert isinstance(
        unquantized.get_quant_method(linear(1), "model.layers.0.self_attn.o_proj"), UnquantizedLinearMethod
    )


def test_joined_matrices_must_agree():
    config = configured(mode="w4a16", exclude=["model.layers.0.self_attn.k_proj"])
    with pytest.raises(
        ValueError, match=r"quantize .*q_proj, .*v_proj and leave out model\.layers\.0\.self_attn\.k_proj"
    ):
        config.get_quant_method(linear(3), "model.layers.0.self_attn.qkv_proj")
    assert isinstance(config.get_quant_method(linear(3), "model.layers.1.self_attn.qkv_proj"), QuadsLinearMethod)


def test_an_unknown_joined_layer_can_be_excluded_by_its_own_name():
    name = "model.layers.0.self_attn.fused_qkv_a_proj"
    with pytest.raises(ValueError, match="joins 2 matrices"):
        configured(mode="w4a16").get_quant_method(linear(2), name)
    excluded = configured(mode="w4a16", exclude=[name])
    assert isinstance(excluded.get_quant_method(linear(2), name), UnquantizedLinearMethod)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "speculative"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_e4m3")}, "kv_cache_dtype=fp8_e4m3"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"data_parallel_size": 2}, "experts over data parallel engines"),
        ({"enable_expert_parallel": True, "data_parallel_size": 2}, "experts over data parallel engines"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_engine_options_that_are_refused(changes, message):
    sizes = ("pipeline", "data", "decode_context", "prefill_context")
    parallel = {f"{name}_parallel_size": 1 for name in sizes} | dict(enable_expert_parallel=False, enable_eplb=False)
    parallel.update({key: value for key, value in changes.items() if key in parallel})
    engine = SimpleNamespace(
        lora_config=changes.get("lora_config"),
        speculative_config=changes.get("speculative_config"),
        cache_config=changes.get("cache_config", SimpleNamespace(cache_dtype="auto")),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(is_moe=True),
    )
    with pytest.raises(ValueError, match=message):
        config_module._check_engine(engine)
