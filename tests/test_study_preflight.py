"""`quads study` finds what is wrong with its policy and its data before it starts anything, for every arm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support_models import FAMILIES, save_checkpoint
from support_preflight import ROW, overridden, save_data
from support_study import make_plan

from quads_ops.settings import ARMS
from quads_recipe.study import cli, command, data, notes, plan, policy, preflight, prepare, runner
from quads_recipe.study.plan import StudyError

ACTOR = "actor_rollout_ref.actor."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("policy") / "tiny", "qwen3_moe")


@pytest.fixture(scope="module")
def files(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    train, heldout = save_data(folder / "train.parquet"), save_data(folder / "heldout.parquet", rows=20)
    return command.Files(checkpoint, train, heldout)


@pytest.fixture(scope="module")
def configs(files):
    """Of every arm, as a study with `--data` composes them."""
    return command.compose_arms(make_plan(arms=tuple(ARMS), data={"a": "b"}), files, Path("run"))


def changed(configs, *overrides):
    return {arm: overridden(config, *overrides) for arm, config in configs.items()}


def check(configs, *overrides, finite=False):
    with preflight.environment({"VERL_PLATFORM": "cpu"}):
        preflight.check_runs(changed(configs, *overrides), overrides, here=True, policy=True, finite=finite)


def of_policy(configs, folder, **options):
    check(
        {arm: overridden(config, f"actor_rollout_ref.model.path='{folder}'") for arm, config in configs.items()},
        **options,
    )


def copied(checkpoint, folder):
    return Path(shutil.copytree(checkpoint, folder))


def dry_run(*given, capsys):
    """(status, what was printed)."""
    status = cli.main(["--dry-run", *map(str, given)])
    out, err = capsys.readouterr()
    return status, out + err


# --- what is fine


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_with_every_arm(family, configs, tmp_path):
    of_policy(configs, save_checkpoint(tmp_path, family), finite=True)


def test_unusual_checkpoints_pass(configs, tmp_path):
    tied = save_checkpoint(tmp_path / "tied", "qwen3_moe", tie_word_embeddings=True, num_hidden_layers=1)
    one_expert = save_checkpoint(tmp_path / "one", "mixtral", num_local_experts=1, num_experts_per_tok=1)
    in_bf16 = save_checkpoint(tmp_path / "bf16", "qwen3", dtype=torch.bfloat16)
    for folder in (tied, one_expert, in_bf16):
        of_policy(configs, folder, finite=True)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--preset", "paper-mini"],
        ["--policy", "natural"],
        ["--stress", "outliers64", "--stress", "stale16", "--stress", "long"],
        ["--outlier-strength", "4", "--stress", "outliers-many", "--stress", "lr1e-3"],
        ["--set", "quads.rollout.residual.score=sensitivity", "--set", "actor_rollout_ref.actor.optim.lr=1e-5"],
        ["--arms", "bf16,fp8", "--seeds", "2", "--jobs", "2"],
    ],
)
def test_a_dry_run_of_what_ships_passes_and_writes_nothing(given, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text = dry_run(*given, "--out", tmp_path / "study", capsys=capsys)
    assert status == 0 and "held-out problems" in text and "warning" not in text, text
    assert not list(tmp_path.iterdir())


def test_own_policy_and_data_pass_and_all_heldout_problems_are_counted(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, text = dry_run(
        "--policy", files.policy, "--data", files.train, files.heldout, "--heldout", 7, capsys=capsys
    )
    assert status == 0 and "evaluation: 20 held-out problems" in text and "note: --heldout 7: has no effect" in text
    assert not list(tmp_path.iterdir())


def test_own_files_of_one_name_are_told_apart(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = []
    for folder, file in (("a", files.train), ("b", files.heldout)):
        (tmp_path / folder).mkdir()
        data.append(shutil.copy(file, tmp_path / folder / "x.parquet"))
    args = cli.parser().parse_args(["--policy", str(files.policy), "--data", *map(str, data), "--dry-run"])
    found = prepare.prepare(args).plan.data
    assert set(found) == {"train", "heldout"} and found["train"] != found["heldout"]


def test_an_own_reward_scores_own_data(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = save_data(tmp_path / "mine.parquet", data_source="mine")
    own = ("--policy", files.policy, "--data", mine, mine)
    status, text = dry_run(*own, capsys=capsys)
    assert status == cli.WRONG and "verl has no reward for data_source 'mine'" in text
    (tmp_path / "reward.py").write_text("def compute_score(**facts):\n    return 0.0\n")
    status, text = dry_run(*own, "--set", "reward.custom_reward_function.path=reward.py", capsys=capsys)
    assert status == 0, text
    status, text = dry_run(*own, "--set", "reward.custom_reward_function.path=none.py", capsys=capsys)
    assert status == cli.WRONG and "--set: reward.custom_reward_function.path = 'none.py': no such file" in text


# --- the policy


def damaged(name, checkpoint, folder):
    """A copy of the checkpoint with something wrong."""
    if name in ("K", "K of experts"):
        sizes = {"hidden_size": 120} if name == "K" else {"moe_intermediate_size": 24}
        return save_checkpoint(folder, "qwen3_moe", **sizes)
    copied(checkpoint, folder)
    weights = folder / "model.safetensors"
    if name == "tokenizer":
        for file in [*folder.glob("token*"), *folder.glob("chat*")]:
            file.unlink()
    elif name == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif name == "index":
        weights.rename(folder / "model-00001-of-00002.safetensors")
        names = dict.fromkeys(
            load_file(folder / "model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors"
        )
        names[next(iter(names))] = "model-00002-of-00002.safetensors"
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {names}}}'.replace("'", '"'))
    elif name == "config":
        (folder / "config.json").write_text('{"model_type": "nonsense"}')
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer", "--policy: .*tokenizer"),
        ("cut", "--policy: .*model.safetensors.* can't be read"),
        ("index", "--policy: .*model-00002-of-00002.safetensors is missing"),
        ("config", "--policy: .*"),
        ("K", r"q_proj.weight has K = 120, which is not a multiple of 16.* \(arm naive\)"),
        ("K of experts", r"down_proj has K = 24, which is not a multiple of 16.* \(arm fp8\)"),
    ],
)
def test_a_policy_that_no_run_could_use(name, said, checkpoint, configs, tmp_path):
    arms = configs if name != "K" else {arm: configs[arm] for arm in ("bf16", "naive", "quads")}
    with pytest.raises(StudyError, match=said) as error:
        of_policy(arms, damaged(name, checkpoint, tmp_path / "policy"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, checkpoint, configs, tmp_path):
    folder = copied(checkpoint, tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StudyError, match=f"--policy: .*{name}"):
        of_policy(configs, folder, finite=True)
    of_policy(configs, folder)  # not read: a large one, whose runs look at their first sync


@pytest.mark.parametrize(("limit", "status"), [(notes.READ_GIB, cli.WRONG), (0, 0)])
def test_only_small_weights_are_read(limit, status, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notes, "READ_GIB", limit)
    folder = copied(checkpoint, tmp_path / "policy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found, text = dry_run("--policy", folder, capsys=capsys)
    assert found == status
    assert "model.norm.weight" in text if status else "were not looked through for NaN and infinity" in text


# --- settings


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n = 0: must be a whole number, 1 or more"),
        ("actor_rollout_ref.rollout.temperature=0", "temperature = 0: must be 0.01 or more"),
        ("data.train_batch_size=8", "data.train_batch_size = 8: is less than a mini-batch"),
        (ACTOR + "ppo_micro_batch_size_per_gpu=100", "must divide the 128 responses of a rank"),
        (ACTOR + "ppo_micro_batch_size=8", "is an old setting of verl; use ppo_micro_batch_size_per_gpu"),
        ("quads.rollout.residual.ratio=2", "quads.rollout.residual.ratio = 2"),
        (
            "data.train_batch_size='${nope}'",
            "data.train_batch_size: Interpolation key 'nope' not found; set what is there",
        ),
        ("quads.exclude=['re:nothing']", "quads.exclude = 're:nothing': matches no module"),
        ("reward.custom_reward_function.path=none.py", "'none.py': no such file"),
        (
            "+" + ACTOR + "optim.lrr=1e-4",
            ACTOR + "optim.lrr = 0.0001: verl's FSDPOptimizerConfig has no such field; perhaps lr is meant",
        ),
        ("+actor_rollout_ref.rollout.val_kwargs.zzz=1", "it has do_sample, n, temperature, top_k, top_p"),
        ("+actor_rollout_ref.model.mtpp=1", "verl's HFModelConfig has no such field; perhaps mtp is meant"),
        (ACTOR + "loss_agg_mode=mean", "loss_agg_mode"),
    ],
)
def test_settings_are_checked_as_main_ppo_checks_them(configs, override, said):
    with pytest.raises(StudyError) as error:
        check(configs, override)
    assert str(error.value).startswith("--set: ") and said in str(error.value) and "\n" not in str(error.value)


def test_what_nobody_set_is_not_said_to_be(configs, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    with pytest.raises(StudyError, match="^VLLM_PLUGINS = 'none'"):
        check(configs)


def test_the_environment_is_as_it_was(monkeypatch):
    monkeypatch.setenv("A", "1")
    monkeypatch.delenv("B", raising=False)
    with preflight.environment({"A": "2", "B": "3"}):
        import os

        assert (os.environ["A"], os.environ["B"]) == ("2", "3")
    assert os.environ["A"] == "1" and "B" not in os.environ


def test_arms_are_composed_as_their_runs_are(files):
    for changes in ({}, {"config": "quads", "overrides": ("actor_rollout_ref.rollout.enforce_eager=false",)}):
        asked = make_plan(arms=("bf16", "fp8", "quads"), data={"a": "b"}, **changes)
        for arm, config in command.compose_arms(asked, files, Path("run")).items():
            assert config == command.compose(asked, arm, asked.seeds[0], files, Path("run"))
    eager = make_plan(arms=("bf16", "fp8"), config="quads", data={"a": "b"})
    found = command.compose_arms(eager, files, Path("run"))
    assert [found[arm].actor_rollout_ref.rollout.enforce_eager for arm in eager.arms] == [False, True]


# --- data


def own(config, train=None, heldout=None, steps=5, *overrides):
    changes = [f"{name}='{file}'" for name, file in (("data.train_files", train), ("data.val_files", heldout)) if file]
    return preflight.check_own_data(overridden(config, *changes, *overrides), overrides, steps)


def rows(file, **columns):
    """64 rows, of which the sixth has other values."""
    frame = pandas.DataFrame([ROW] * 64)
    for column, value in columns.items():
        frame.at[5, column] = value
    frame.to_parquet(file)
    return file


def test_own_data_of_every_kind_that_verl_reads(configs, tmp_path):
    assert own(configs["quads"]) == 20
    assert own(configs["quads"], save_data(tmp_path / "more.parquet", rows=17, extra_info={"index": 1})) == 20


@pytest.mark.parametrize("which", ["train", "heldout"])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda file: save_data(file, "prompt"), "has no column prompt"),
        (lambda file: save_data(file, "data_source"), "has no column data_source"),
        (lambda file: save_data(file, rows=0), "has no"),
        (lambda file: save_data(file, prompt="1+1"), "column prompt holds "),
        (lambda file: file.write_bytes(save_data(file).read_bytes()[:-50]), "not a parquet that can be read"),
        (lambda file: file.write_text("{}"), "not a parquet that can be read"),
        (lambda file: rows(file, prompt=None), "row 6 of column prompt is empty"),
        (lambda file: rows(file, prompt=[]), "row 6 of column prompt is empty"),
    ],
)
def test_data_that_no_run_could_use(write, said, which, configs, tmp_path):
    file = tmp_path / "data.parquet"
    write(file)
    with pytest.raises(StudyError, match=f"--data: {file}: .*{said}"):
        own(configs["quads"], **{which: file})


def test_heldout_problems_that_no_evaluation_could_score(configs, tmp_path):
    with pytest.raises(StudyError, match="row 6 of column reward_model has no ground_truth"):
        own(configs["quads"], heldout=rows(tmp_path / "data.parquet", reward_model=None))
    pandas.DataFrame([ROW] * 4).to_json(tmp_path / "data.jsonl", orient="records", lines=True)
    with pytest.raises(StudyError, match="held-out problems are read from a parquet"):
        own(configs["quads"], heldout=tmp_path / "data.jsonl")


def test_more_steps_than_the_data_have(configs, tmp_path):
    own(configs["quads"], steps=400)  # 64 rows in batches of 16, 100 times
    with pytest.raises(StudyError, match="--steps: 401 are more than the 400 that 64 training problems give"):
        own(configs["quads"], steps=401)
    with pytest.raises(StudyError, match="the 100 that 16 training problems give"):
        own(configs["quads"], None, None, 101, "data.train_max_samples=16")


def prompts(files, *overrides, train=None, heldout=None, terms=None, mine=True):
    config = command.compose(make_plan(data={"a": "b"}), "quads", 0, files, Path("run"))
    given = (train or files.train, heldout or files.heldout) if mine else None
    preflight.check_prompts(overridden(config, *overrides), files.policy, overrides, given, terms)


def test_prompts_in_tokens(files, tmp_path):
    prompts(files)
    long = save_data(tmp_path / "long.parquet", prompt=[{"role": "user", "content": "1+" * 60}])
    with pytest.raises(StudyError, match="data.max_prompt_length = 24: 64 of 64 training prompts looked at are longer"):
        prompts(files, train=long)
    with pytest.raises(StudyError, match="data.max_prompt_length = 24: every held-out problem is longer"):
        prompts(files, heldout=long)
    prompts(files, "data.max_prompt_length=200", train=long, heldout=long)
    pandas.concat([pandas.read_parquet(long), pandas.read_parquet(files.train)]).to_parquet(tmp_path / "some.parquet")
    with pytest.raises(StudyError, match="64 of 128 training prompts looked at are longer"):
        prompts(files, train=tmp_path / "some.parquet")
    prompts(
        files, "data.filter_overlong_prompts=true", train=tmp_path / "some.parquet", heldout=tmp_path / "some.parquet"
    )


def test_prompts_that_the_policy_cannot_read_are_said(files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "Please tell me"}]
    mine = save_data(tmp_path / "mine.parquet", prompt=chat, data_source="arithmetic")
    given = ("--data", mine, mine, "--set", "reward.custom_reward_function.path=pkg://quads_recipe.reward")
    status, text = dry_run(*given, capsys=capsys)
    assert status == 0 and "warning: --data: " in text and "tokens are <unk>" in text, text


def test_generated_prompts_in_tokens(files):
    prompts(files, mine=False)
    prompts(files, "data.max_prompt_length=40", mine=False, terms=(4, 5))
    with pytest.raises(StudyError, match="data.max_prompt_length = 5: "):
        prompts(files, "data.max_prompt_length=5", mine=False)


def test_generated_data_of_an_earlier_start(configs, tmp_path):
    data.write(tmp_path, (0, 1), train=32, heldout=4, terms=None)
    config = overridden(configs["quads"], "reward.custom_reward_function.path=pkg://quads_recipe.reward")
    preflight.check_generated(config, tmp_path, (0, 1, 2))
    file = data.train_file(tmp_path, 1)
    file.write_bytes(file.read_bytes()[:-20])
    preflight.check_generated(config, tmp_path, (0,))
    with pytest.raises(StudyError, match=f"{file}: not a parquet .*remove it, and it is generated again"):
        preflight.check_generated(config, tmp_path, (0, 1))
    file.unlink()
    (tmp_path / data.HELDOUT).write_text("")
    with pytest.raises(StudyError, match="heldout.parquet: .*remove it"):
        preflight.check_generated(config, tmp_path, (0,))


# --- on the command line


def test_a_start_and_a_dry_run_find_the_same(checkpoint, files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quads_recipe.study.runner.lock", lambda study: pytest.fail("the study was started"))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(files.train.read_bytes()[:-50])
    folder = damaged("cut", checkpoint, tmp_path / "policy")
    for given, said in (
        (["--policy", folder], f"--policy: {folder}: "),
        (["--policy", checkpoint, "--data", files.train, cut], f"--data: {cut}: "),
        (["--policy", checkpoint, "--data", cut, files.heldout], f"--data: {cut}: "),
    ):
        for way in ([], ["--dry-run"]):
            assert cli.main([*map(str, given), *way]) == cli.WRONG
            out, err = capsys.readouterr()
            assert not out and err.startswith(f"quads study: {said}") and len(err.splitlines()) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cut.parquet", "policy"]


def test_the_gpu_plan_is_shown_anywhere_and_what_is_given_is_checked(checkpoint, files, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    gpu = ("--preset", "gpu")
    status, text = dry_run(*gpu, "--policy", checkpoint, "--data", files.train, files.heldout, capsys=capsys)
    assert status == cli.WRONG and "holds 64 rows, which is no batch" in text
    small = ("--set", "data.train_batch_size=64", "--set", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    mine = ("--policy", checkpoint, "--data", files.train, files.heldout, "--steps", 3)
    status, text = dry_run(*gpu, *mine, *small, capsys=capsys)
    assert status == 0 and "policy tiny," in text and "needs CUDA GPUs" in text and "needs --policy" not in text
    status, text = dry_run(*gpu, "--policy", damaged("cut", checkpoint, tmp_path / "cut"), capsys=capsys)
    assert status == cli.WRONG and "--policy: " in text and "model.safetensors" in text


def test_the_folder_of_another_study_is_seen_by_a_dry_run(checkpoint, tmp_path, capsys):
    study = tmp_path / "study"
    given = cli.parser().parse_args(["--policy", str(checkpoint), "--out", str(study), "--steps", "3"])
    prepare.commit(prepare.prepare(given))
    same = ("--policy", checkpoint, "--out", study)
    assert dry_run(*same, "--steps", 3, "--seeds", 2, capsys=capsys)[0] == 0
    assert "can't start now" not in dry_run(*same, "--steps", 3, capsys=capsys)[1]
    with runner.lock(study):
        status, text = dry_run(*same, "--steps", 3, capsys=capsys)
    assert status == 0 and "can't start now: another `quads study` is running in this folder" in text
    status, text = dry_run(*same, "--steps", 4, capsys=capsys)
    assert status == cli.WRONG and "steps: 3 there, 4 asked for" in text
    assert plan.read(study).seeds == (0,)


def test_a_policy_with_other_outliers_is_made_with_the_lock_only(tmp_path, monkeypatch):
    study = tmp_path / "study"
    given = cli.parser().parse_args(["--outlier-strength", "64", "--out", str(study), "--arms", "bf16"])
    prepared = prepare.prepare(given)
    assert prepared.policy is None and not study.exists() and prepared.about["outliers"]["strength"] == 64
    (study / "policy.part").mkdir(parents=True)  # of a start that was killed
    (study / "policy.part" / "config.json").write_text("{")
    prepare.commit(prepare.prepare(given))
    assert policy.outliers_of(study / "policy")["strength"] == 64 and not (study / "policy.part").exists()
    assert plan.read(study).policy_digest == plan.policy_digest(study / "policy")
    prepare.commit(prepare.prepare(given))  # goes on
    shutil.rmtree(study / "policy")
    monkeypatch.setattr(plan, "policy_digest", lambda folder: pytest.fail("of a policy that is not there"))
    assert prepare.prepare(given).policy is None  # and is made again


def test_omegaconf_settings_are_unchanged_by_the_checks(configs):
    before = OmegaConf.to_container(configs["quads"])
    check({"quads": configs["quads"]})
    assert OmegaConf.to_container(configs["quads"]) == before
