"""What only a run on GPUs meets, as far as it is decided before Ray starts. No GPU is needed: torch is told of one."""

from importlib.machinery import ModuleSpec, PathFinder

import pytest
from support_preflight import MODEL, changed, compose_config, of, save_inputs

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import preflight, preflight_attention, preflight_ray

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
SDPA = of(MODEL, override_config={"attn_implementation": "sdpa"})


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    few = ["ppo_micro_batch_size_per_gpu=8", "ppo_mini_batch_size=8"]
    given = [*(ACTOR + one for one in few), ROLLOUT + "log_prob_micro_batch_size_per_gpu=8", ROLLOUT + "n=8"]
    given += [ROLLOUT + "tensor_model_parallel_size=1", "data.train_batch_size=16", "trainer.n_gpus_per_node=8"]
    return compose_config(save_inputs(tmp_path_factory.mktemp("gpu")), *given, config="quads")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Of a GPU cluster: no Ray runs, 64 CPUs, and by default a GPU and no flash-attn."""
    for name in ("VERL_PLATFORM", "RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def make(gpu=True, cpus=64, packages=()):
        monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
        monkeypatch.setattr("os.cpu_count", lambda: cpus)
        found = {name: ModuleSpec(name, None, origin=f"{name}/__init__.py") for name in packages}
        monkeypatch.setattr(preflight_attention, "find_spec", found.get)

    make()
    return make


def check(config):
    preflight.check_environment(config)
    preflight.check_config(config, QuadsSettings.from_dict({}))
    preflight_ray.check(config)


def test_the_config_for_gpus_passes_on_a_machine_that_has_them(composed, machine, monkeypatch):
    machine(packages=["flash_attn"])
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    check(composed)


# --- a cluster that was started before


def joined(monkeypatch, tmp_path, how: str) -> dict:
    """Settings with which ray.init joins a cluster, in each of its ways."""
    if how == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    if how in ("file", "auto"):
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    if how == "folder":
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "ray_current_cluster").write_text("10.0.0.1:6379")
        return of("ray_kwargs.ray_init.", _temp_dir=str(tmp_path / "other"))
    return of("ray_kwargs.ray_init.", address={"address": "10.0.0.1:6379", "auto": "auto"}.get(how))


@pytest.mark.parametrize("how", ["address", "auto", "environment", "file", "folder"])
def test_a_machine_without_gpus_may_start_a_run_on_a_cluster(composed, machine, monkeypatch, tmp_path, how):
    machine(gpu=False, cpus=2)
    with pytest.raises(SettingsError, match="trainer.device = 'cuda': no CUDA device is visible"):
        check(composed)
    check(changed(composed, **joined(monkeypatch, tmp_path, how)))


@pytest.mark.parametrize("how", ["no", "local"])
def test_a_cluster_that_the_run_starts_needs_its_cpus_here(composed, machine, monkeypatch, tmp_path, how):
    machine(cpus=8, packages=["flash_attn"])
    config = composed
    if how == "local":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        config = changed(composed, **of("ray_kwargs.ray_init.", address="local"))
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    with pytest.raises(SettingsError, match="num_cpus = None: is too few.*Set it to 25"):
        check(config)


@pytest.mark.parametrize(
    ("ray", "tmp", "named"),
    [
        (None, "/tmp/" + "x" * 30, None),  # Ray adds /ray, and not the longer name that a run on a CPU has
        (None, "/tmp/" + "x" * 40, "TMPDIR"),
        ("/tmp", "/tmp/" + "x" * 60, None),
        ("/tmp/" + "x" * 40, "/tmp", "RAY_TMPDIR"),
        ("/tmp", "/tmp/" + "x" * 90, "TMPDIR"),
    ],
)
def test_paths_of_sockets(composed, machine, monkeypatch, ray, tmp, named):
    monkeypatch.setenv("TMPDIR", tmp)
    monkeypatch.setattr("tempfile.tempdir", tmp)
    if ray:
        monkeypatch.setenv("RAY_TMPDIR", ray)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    if named is None:
        preflight_ray.check(composed)
        return
    with pytest.raises(SettingsError, match=f"^{named} = .*too long for the sockets"):
        preflight_ray.check(composed)


# --- attention


def test_flash_attention_that_is_not_installed(composed, machine):
    with pytest.raises(SettingsError, match="attn_implementation = 'flash_attention_2': needs the package flash-attn"):
        preflight_attention.check(composed)
    preflight_attention.check(changed(composed, **SDPA))
    for packages in (["flash_attn"], ["kernels"]):
        machine(packages=packages)
        preflight_attention.check(composed)
    machine(gpu=False)  # the workers' packages can't be seen from here
    preflight_attention.check(composed)


def test_a_folder_named_as_the_package_is_not_the_package(composed, machine, monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir()
    found = {"kernels": PathFinder.find_spec("kernels", [str(tmp_path)])}
    assert found["kernels"] is not None
    monkeypatch.setattr(preflight_attention, "find_spec", found.get)
    with pytest.raises(SettingsError, match="needs the package flash-attn"):
        preflight_attention.check(composed)


@pytest.mark.parametrize("name", ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"])
def test_sequence_parallelism_without_flash_attention(composed, machine, name):
    machine(packages=["flash_attn"])
    parallel = of(ACTOR, **{name: 2})
    preflight_attention.check(changed(composed, **parallel))
    with pytest.raises(SettingsError, match="ulysses_sequence_parallel_size = 2: is for flash attention only.*sdpa"):
        preflight_attention.check(changed(composed, **parallel, **SDPA))
    preflight_attention.check(changed(composed, **SDPA))


# --- settings that are checked on every device


@pytest.mark.parametrize("arm", ["bf16", "quads"])
def test_lora_is_refused_in_every_arm(composed, machine, arm):
    """The engine has no way to send adapters, and would say so after the model was loaded."""
    machine(packages=["flash_attn"])
    with pytest.raises(SettingsError, match="model.lora_rank = 8: LoRA is not supported"):
        preflight.check_config(changed(composed, **of(MODEL, lora_rank=8)), QuadsSettings.from_dict({"arm": arm}))


def test_batches_are_counted_alike_in_training_and_logprobs(composed, machine):
    """verl asserts it in every worker."""
    machine(packages=["flash_attn"])
    dynamic = of(ACTOR, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=16384)
    check(changed(composed, **dynamic, **of("ray_kwargs.ray_init.", address="auto")))
    with pytest.raises(SettingsError, match="log_prob_use_dynamic_bsz = False: must be as .*use_dynamic_bsz, True"):
        check(changed(composed, **dynamic, **of(ROLLOUT, log_prob_use_dynamic_bsz=False)))


def test_one_response_to_a_prompt_is_fine_with_a_teacher(composed, machine):
    machine(packages=["flash_attn"])
    single = of(ROLLOUT, n=1) | of("data.", train_batch_size=64) | of(ACTOR, ppo_mini_batch_size=64)
    with pytest.raises(SettingsError, match="rollout.n = 1: grpo compares the responses to one prompt"):
        preflight.check_config(changed(composed, **single), QuadsSettings.from_dict({}))
    preflight.check_config(
        changed(composed, **single, **of("distillation.", enabled=True)), QuadsSettings.from_dict({})
    )
