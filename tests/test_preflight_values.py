"""Odd values in the run's configuration, each beside a neighbour that is fine, and files of data without a column."""

import pandas
import pytest
from support_preflight import MODEL, ROLLOUT, ROW, changed, compose_config, of, overridden, save_data, save_inputs

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import derive, preflight, preflight_ray

FSDP = "actor_rollout_ref.actor.fsdp_config."
KWARGS = ROLLOUT + "engine_kwargs.vllm."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose_config(save_inputs(tmp_path_factory.mktemp("values")))


def check(config, **block):
    lines = preflight.check_config(config, QuadsSettings.from_dict(block))
    preflight_ray.check(config)
    return lines


# setting: (values that are refused, what the error says, values that are fine)
VALUES = {
    ROLLOUT + "max_model_len": ((63, 0), "max_prompt_length + data.max_response_length = 64", (64, None)),
    KWARGS + "max_model_len": ((63,), "= 64", (64, -1, "64k")),
    ROLLOUT + "gpu_memory_utilization": ((0, 1.01, -0.5, "much", None), "share of the device's memory", (0.05, 1, 1.0)),
    KWARGS + "gpu_memory_utilization": ((2,), "share of the device's memory", (0.9, None)),
    "trainer.logger": (
        (["console", "wandbb"], "tensorbord", None, 5),
        "is no logger of verl; use some of wandb",
        (["console", "file"], "wandb", "tracking", []),
    ),
    "trainer.total_training_steps": ((0, -1, "many"), "trains nothing", (1, None)),
    "trainer.total_epochs": ((0, -3, None), "trains nothing", (1, 0.5)),
    "trainer.n_gpus_per_node": ((0, 1.5), "whole number", (1,)),
    "trainer.resume_mode": (("foo", None), "use disable, auto or resume_path", ("disable", "auto")),
    "ray_kwargs.ray_init.num_cpus": ((0, 2, 3, "all"), "Ray would wait for ever", (4, 16)),
    "ray_kwargs.ray_init._temp_dir": (("/tmp/" + "x" * 40,), "too long for the sockets", ("/tmp/r", None)),
    "ray_kwargs.ray_init": ((None, 3), "must be a mapping", ()),
    FSDP + "model_dtype": (("fp8", "int8"), "is no dtype that verl knows", ("fp32", "bf16", None)),
    ROLLOUT + "load_format": (("gguf", "dumy"), "gets its weights from the actor", ("dummy", "auto", "safetensors")),
    KWARGS + "load_format": (("bitsandbytes", "sharded_state"), "gets its weights from the actor", ("auto", None)),
    KWARGS + "enable_lora": ((True,), "lora_rank", (False, None)),
    KWARGS + "model": (("other",), "use actor_rollout_ref.model.path", (None,)),
    KWARGS + "tokenizer": (("other",), "use actor_rollout_ref.model.tokenizer_path", (None,)),
}


@pytest.mark.parametrize("name", VALUES)
def test_odd_values_are_one_clear_error_and_their_neighbours_pass(config, name):
    wrong, message, right = VALUES[name]
    for value in wrong:
        with pytest.raises(SettingsError) as caught:
            check(changed(config, **of("", **{name: value})))
        assert str(caught.value).startswith(f"{name} = {value!r}: "), caught.value
        assert message in str(caught.value) and "\n" not in str(caught.value)
    for value in right:
        check(changed(config, **of("", **{name: value})))


def test_a_tokenizer_for_vllm_that_is_the_actors(config):
    given = of(KWARGS, tokenizer="elsewhere") | of(MODEL, tokenizer_path="elsewhere")
    check(changed(config, **given))


@pytest.mark.parametrize(
    ("tp", "devices", "nodes", "fits"), [(2, 1, 1, False), (2, 3, 1, False), (2, 4, 1, True), (8, 4, 2, True)]
)
def test_tensor_parallel_workers_fill_the_devices(config, tp, devices, nodes, fits):
    given = of(ROLLOUT, tensor_model_parallel_size=tp) | of("trainer.", n_gpus_per_node=devices, nnodes=nodes)
    given |= of(ROLLOUT, log_prob_micro_batch_size_per_gpu=8)
    given |= of("actor_rollout_ref.actor.", ppo_micro_batch_size_per_gpu=8)
    if fits:
        check(changed(config, **given))
        return
    with pytest.raises(SettingsError, match=f"tensor_model_parallel_size = {tp}: does not divide the {devices} device"):
        check(changed(config, **given))


def test_master_weights_of_another_dtype_are_said(config):
    assert check(config) == []
    [line] = check(changed(config, **of(FSDP, model_dtype="bf16")))
    assert "master weights are bf16" in line and "model_dtype" in line


COLUMNS = {
    "reward": (("reward_model",), {}, {}, "has no column reward_model (reward.reward_manager.name=naive)"),
    "source": (("data_source",), {}, {}, "has no column data_source (reward.reward_manager.name=naive)"),
    # The user's function is called with what the manager read from both columns.
    "own-function": (
        ("data_source",),
        of("reward.custom_reward_function.", path=__file__, name="check"),
        {},
        "no column data_source",
    ),
    "own-manager": (
        ("reward_model",),
        of("reward.reward_manager.", source="importlib", module__path=__file__, name="check"),
        {},
        None,
    ),
    "own-manager-old-name": (("reward_model",), of("reward_model.", reward_loop_source="importlib"), {}, None),
    "reward-model": (("reward_model",), of("reward.reward_model.", enable=True), {}, None),
    "own-dataset": (("reward_model", "prompt"), of("data.custom_cls.", path=__file__, name="check"), {}, None),
    "own-agent": (("reward_model",), {}, {"agent_name": "mine"}, None),
    "other-key": (("prompt",), of("data.", prompt_key="question"), {"question": ROW["prompt"]}, None),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_are_needed_only_where_verl_reads_them(config, tmp_path, case):
    without, given, columns, message = COLUMNS[case]
    data = save_data(tmp_path / "d.parquet", *without, **columns)
    given = given | of("data.", train_files=str(data), val_files=[str(data)])
    if message is None:
        check(changed(config, **given))
        return
    with pytest.raises(SettingsError) as caught:
        check(changed(config, **given))
    assert str(caught.value).startswith("data.train_files = ") and message in str(caught.value)


def test_a_checkpoint_to_resume_from(config, tmp_path):
    def resumed(path):
        return changed(config, **of("trainer.", resume_mode="resume_path", resume_from_path=path))

    (tmp_path / "global_step_3").mkdir()
    check(resumed(str(tmp_path / "global_step_3")))
    check(resumed("hdfs://host/global_step_3"))
    for path in (None, str(tmp_path), str(tmp_path / "global_step_4")):
        with pytest.raises(SettingsError, match="trainer.resume_from_path = .*global_step_N"):
            check(resumed(path))


def test_a_temporary_folder_too_long_for_sockets(config, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 40)
    with pytest.raises(SettingsError, match="TMPDIR = .*too long for the sockets"):
        check(config)


@pytest.mark.parametrize("prompt", [None, []])
def test_a_prompt_that_is_empty(config, tmp_path, prompt):
    rows = [dict(ROW) for _ in range(64)]
    rows[2]["prompt"] = prompt
    pandas.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(SettingsError, match="row 3 of column prompt is empty"):
        check(changed(config, **of("data.", train_files=str(tmp_path / "data.parquet"))))


def test_prompts_that_are_no_chats(config, tmp_path):
    file = save_data(tmp_path / "data.parquet", prompt="1 + 1")
    with pytest.raises(SettingsError, match="data.train_files = .*holds (large_)?string; verl needs chat messages"):
        check(changed(config, **of("data.", train_files=str(file))))


def test_files_of_another_kind(config, tmp_path):
    file = save_data(tmp_path / "data.parquet").rename(tmp_path / "data.pq")
    with pytest.raises(SettingsError, match="data.train_files = .*data.pq': verl reads files that end with .parquet"):
        check(changed(config, **of("data.", train_files=str(file))))
    (tmp_path / "data.jsonl").touch()
    check(changed(config, **of("data.", train_files=str(tmp_path / "data.jsonl"))))


def test_data_that_are_damaged_within(config, tmp_path):
    """The end of the file, which says what it holds, is whole."""
    file = save_data(tmp_path / "data.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    with pytest.raises(SettingsError, match="data.train_files = .*: not a parquet that can be read: "):
        check(changed(config, **of("data.", train_files=str(file))))


def test_data_that_verl_has_no_reward_for(config, tmp_path):
    file = save_data(tmp_path / "own.parquet", data_source="chain_sum")
    own = changed(config, **of("data.", train_files=str(file), val_files=str(file)))
    with pytest.raises(SettingsError, match="no reward for data_source 'chain_sum'; set reward.custom_reward"):
        check(own)
    check(changed(own, **of("reward.custom_reward_function.", path=__file__, name="check")))


@pytest.mark.parametrize(
    "name", ["data.train_files", MODEL + "path", MODEL + "hf_config_path", MODEL + "tokenizer_path"]
)
def test_a_home_of_nobody(config, name):
    with pytest.raises(SettingsError, match=f"{name} = '~nosuchuser/x': there is no such user") as error:
        derive.prepare(overridden(config, f"{name}='~nosuchuser/x'"))
    assert error.value.name == name
