"""`quads study`: options that are out of range, have no effect, contradict others, or are the study's own to set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support_study import make_plan, write_study

from quads_recipe.study import arguments, cli, command, folder, notes, overrides
from quads_recipe.study.plan import StudyError
from quads_recipe.study.presets import PRESETS, STRESSES, contradiction

FILES = command.Files(Path("policy"), Path("train.parquet"), Path("heldout.parquet"))


def wrong(*given, capsys):
    """The one line that a wrong command line ends with."""
    assert cli.main(list(given)) == cli.WRONG
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1, err
    return err.removeprefix("quads study: ").rstrip()


def parsed(*given):
    return cli.parser().parse_args(list(given))


# --- single options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seeds", "0"], "--seeds: 0 is too few; give 1 or more"),
        (["--seeds", "1000000"], "--seeds: 1000000 is too many; give 1000 or fewer"),
        (["--steps", "-1"], "--steps: -1 is too few"),
        (["--heldout", "1"], "--heldout: 1 is too few; give 2 or more"),
        (["--heldout", "1000000000"], "--heldout: 1000000000 is too many"),
        (["--samples", "0"], "--samples: 0 is too few"),
        (["--jobs", "0"], "--jobs: 0; give at least 1"),
        (["--policy", ""], "--policy: '' names no policy"),
        (["--policy", "~nosuchuser/x"], "--policy: ~nosuchuser/x: there is no such user"),
        (["--policy", "/no/such"], "--policy: '/no/such' is no folder; use natural, outlier or"),
        (["--outlier-strength", "inf"], "--outlier-strength: inf is no factor from 1e-05 to 100000"),
        (["--outlier-strength", "nan"], "--outlier-strength: nan is no factor"),
        (["--outlier-strength", "1e30"], "--outlier-strength: 1e+30 is no factor"),
        (["--outlier-strength", "0"], "--outlier-strength: 0 is no factor"),
        (["--outlier-strength", "-16"], "--outlier-strength: -16 is no factor"),
    ],
)
def test_what_is_out_of_range(given, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for way in ([], ["--dry-run"]):
        assert wrong(*given, *way, capsys=capsys).startswith(said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", [["--policy", "natural"], ["--policy", "llama"], ["--preset", "gpu"]])
def test_a_strength_for_a_policy_without_outliers(other, capsys):
    said = wrong(*other, "--outlier-strength", "0", "--dry-run", capsys=capsys)
    assert said.startswith("--outlier-strength: ") and f"{' '.join(other)} can't be given other outliers" in said


def test_every_stress_setting_and_the_range_of_strengths_are_taken():
    for name, stress in STRESSES.items():
        arguments.check(parsed("--stress", name))
        if "strength" not in stress.outliers:
            arguments.check(parsed("--stress", name, "--outlier-strength", "0.5"))
    for strength in arguments.STRENGTHS:
        arguments.check(parsed("--outlier-strength", str(strength)))
    for name, preset in PRESETS.items():
        arguments.check(parsed("--preset", name))
        for option, (least, most) in arguments.LIMITS.items():
            assert least <= getattr(preset, option) <= most


# --- options that contradict each other, or have no effect


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (("outliers4", "outliers64"), "strength"),
        (("lr3e-4", "long", "lr1e-3"), "actor_rollout_ref.actor.optim.lr"),
        (("outliers-many", "outliers-mlp"), "norm_channels"),
        (("stale16", "epochs4", "minibatch4", "long", "outliers256", "lr1e-3"), None),
        (("outliers64", "outliers64"), None),
        (("outliers64", "outliers-many"), None),
        ((), None),
    ],
)
def test_stress_settings_that_set_the_same_thing_differently(names, what, capsys):
    found = contradiction(names)
    assert (found is None) if what is None else found[2].endswith(what)
    if what:
        given = [part for name in names for part in ("--stress", name)]
        assert wrong(*given, "--dry-run", capsys=capsys) == (
            f"--stress: {names[0]} and {names[-1]} both set {found[2]}, differently; leave one of them out"
        )


def test_two_strengths(capsys):
    given = ("--stress", "outliers4", "--outlier-strength", "4")
    assert wrong(*given, capsys=capsys).startswith("--outlier-strength: --stress outliers4 sets the same")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--report", "--out", "x", "--steps", "3"], "--report: starts nothing, so --steps would have no effect"),
        (["--report", "--out", "x", "--preset", "quick", "--jobs", "1"], "so --jobs, --preset would"),
        (["--report", "--out", "x", "--set", "a=1"], "so --set would"),
        (["--compare", "x", "--seeds", "2"], "--compare: starts nothing, so --seeds would have no effect"),
        (["--compare", "x", "--outlier-strength", "4"], "so --outlier-strength would"),
    ],
)
def test_options_without_effect(given, said, capsys):
    assert said in wrong(*given, capsys=capsys)


@pytest.mark.parametrize("other", [["--report"], ["--compare", "x"]])
def test_two_things_to_do(other, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry-run", *other])
    assert ended.value.code == cli.WRONG and "not allowed with argument --dry-run" in capsys.readouterr().err


def test_what_is_said_about_jobs_and_size(tmp_path, monkeypatch):
    plan = make_plan(arms=("bf16", "quads"), seeds=(0,))
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"total": 24 * 2**30}))
    assert notes.lines(parsed("--jobs", "2"), plan, None, 64) == ()
    [line] = notes.lines(parsed("--jobs", "1000"), plan, None, 64)
    assert line.startswith("note: --jobs 1000: there are only 2 runs")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"total": 13 * 2**30}))
    [line] = notes.lines(parsed("--jobs", "2"), plan, None, 64)
    assert line == "warning: --jobs 2: 2 runs need about 14 GiB, and this machine has 13; give 1"
    assert notes.lines(parsed(), plan, None, 64) == ()
    [line] = notes.lines(parsed("--jobs", "2"), make_plan(config="quads"), None, 64)
    assert "would share the GPUs" in line
    [line] = notes.lines(parsed("--heldout", "9", "--data", "a", "b"), plan, None, 64)
    assert line.startswith("note: --heldout 9: has no effect with --data, whose 64 problems are all used")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(9 * 2**30)  # takes no room
    [line] = notes.lines(parsed(), plan, tmp_path, 64)
    assert line.startswith("note: 9 GiB of weights were not looked through for NaN and infinity")


# --- --set


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("=3", "'=3' names no setting; write it as key=value"),
        ("abc", "'abc' has no '='"),
        ("", "'' has no '='"),
        ("a=[", "hydra can't read 'a=['"),
        ("a b=1", "hydra can't read 'a b=1'"),
        ("~data.seed=1", "'~data.seed=1' removes a setting"),
        ("data.train_batch_size=16,32", "gives several values"),
        ("quads.arm=naive", "sets quads.arm: use --arms"),
        ("++quads.arm=naive", "sets quads.arm: use --arms"),
        ("quads={arm:naive}", "sets quads.arm: use --arms"),
        ("actor_rollout_ref={model:{path:x}}", "sets actor_rollout_ref.model.path: use --policy"),
        ("trainer.total_training_steps=3", "use --steps"),
        ("trainer.default_local_dir=x", "use --out"),
        ("data.train_files=x", "use --data"),
        ("data.val_files=[x]", "use --data"),
        ("actor_rollout_ref.rollout.seed=1", "use --seeds"),
        ("actor_rollout_ref.actor.data_loader_seed=1", "use --seeds"),
        ("actor_rollout_ref.actor.fsdp_config.seed=1", "use --seeds"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "use --seeds"),
        ("trainer.experiment_name=x", "runs are named by arm and seed"),
        ("trainer.resume_mode=auto", "every run of a study starts from --policy"),
        ("hydra.run.dir=x", "hydra's own settings are the study's"),
        ("hydra/job_logging=none", "hydra's own settings are the study's"),
    ],
)
def test_what_may_not_be_set(text, said, capsys):
    for way in ([], ["--dry-run"]):
        line = wrong("--set", text, *way, capsys=capsys)
        assert line.startswith("--set: ") and said in line


def test_what_may_be_set():
    overrides.check(
        ["actor_rollout_ref.actor.optim.lr=1e-3", "quads.probe.every=1", "+quads.x=null", "a=b c", "a='x,y'"]
    )
    overrides.check(["reward.custom_reward_function.path=x.py", "actor_rollout_ref.model.override_config={a:1}"])
    overrides.check(["trainer.logger=[console,tensorboard,file]", "data.seed=1", "trainer={nnodes:1}"])


def test_reserved_settings_are_ones_that_the_study_sets():
    """All of those that differ between runs, or that options set."""
    asked = make_plan()
    mine = [line.split("=")[0] for line in command.overrides(asked, "quads", 1, FILES, Path("run"))]
    free = {
        "quads.probe.every",
        "trainer.logger",
        "trainer.save_freq",
        "trainer.max_actor_ckpt_to_keep",
        "actor_rollout_ref.actor.checkpoint.save_contents",
        "reward.custom_reward_function.path",
    }
    assert {name for name in mine if name not in overrides.RESERVED} == free
    assert set(overrides.OPTIONS) <= set(overrides.RESERVED)


@pytest.fixture(scope="module")
def composed():
    return command.compose(make_plan(), "quads", 0, FILES, Path("run"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "actor_rollout_ref.actor.optim.lrr=1e-4",
            "there is no lrr in actor_rollout_ref.actor.optim; perhaps lr is meant",
        ),
        ("trainr.nnodes=1", "there is no trainr in the configuration; perhaps trainer is meant"),
        ("trainer.zzz.x=1", "there is no zzz in trainer; it has "),
        ("trainer.nnodes.x=1", "trainer.nnodes is a single setting and has no x"),
        ("actor_rollout_ref.rollout.val_kwargs.zzz=1", "it has do_sample, n, temperature, top_k, top_p"),
    ],
)
def test_a_misspelt_setting_is_told_what_there_is(text, said):
    with pytest.raises(StudyError) as error:
        command.compose(make_plan(overrides=(text,)), "quads", 0, FILES, Path("run"))
    assert str(error.value).startswith(f"--set: {text.split('=')[0]}: ") and said in str(error.value)
    assert "object_type" not in str(error.value) and ("+" in str(error.value)) == ("zzz.x" in text)


def test_what_other_code_reads_is_added_with_a_plus():
    name = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs"
    with pytest.raises(StudyError) as error:
        command.compose(make_plan(overrides=(f"{name}=8",)), "quads", 0, FILES, Path("run"))
    assert f"+{name}=... adds one" in str(error.value)
    config = command.compose(make_plan(overrides=(f"+{name}=8",)), "quads", 0, FILES, Path("run"))
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs == 8


@pytest.mark.parametrize("text", ["trainer=null", "algorithm=3", "reward=null", "actor_rollout_ref.actor.optim=[1]"])
def test_a_group_stays_a_group(composed, text):
    with pytest.raises(StudyError, match="replaces a group of settings; set single ones, such as "):
        overrides.check_groups([text], composed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("trainer.logger=[console]", "trainer.logger = ['console']: the study reads what file leaves"),
        ("trainer.logger=console", "trainer.logger = 'console'"),
        ("trainer.save_freq=-1", "trainer.save_freq = -1: the last weights are evaluated"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "add hf_model"),
    ],
)
def test_runs_leave_what_the_study_reads(changes, said):
    overrides.check_groups([changes], command.compose(make_plan(), "quads", 0, FILES, Path("run")))
    with pytest.raises(StudyError, match="--set: ") as error:
        overrides.check_composed(command.compose(make_plan(overrides=(changes,)), "quads", 0, FILES, Path("run")))
    assert said in str(error.value)


def test_settings_of_a_study_leave_what_it_reads(composed):
    overrides.check_composed(composed)
    kept = make_plan(
        save_every=20, overrides=("trainer.logger=[console,tensorboard,file,wandb]", "trainer.save_freq=5")
    )
    overrides.check_composed(command.compose(kept, "quads", 0, FILES, Path("run")))


def test_unknown_settings_are_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("data.nope=1", "nope.x=1"):
        line = wrong("--set", text, "--dry-run", capsys=capsys)
        assert line.startswith("--set: ") and text.partition("=")[0] in line


# --- the folder


@pytest.mark.parametrize("where", ["file/x", "file/x/y", "n" * 300, "/proc/x", "/sys/x/y"])
def test_a_folder_that_cannot_be_made(where, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for way in ([], ["--dry-run"]):
        line = wrong("--out", where, *way, capsys=capsys)
        assert line.startswith("--out: ") and line.endswith("; give another folder")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StudyError, match="--out: can't write in .*: Permission denied; give another folder"):
        folder.require_usable(tmp_path / "x")


def test_a_folder_that_may_not_be_written_by_the_system(tmp_path, monkeypatch):
    def refused(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(StudyError, match="--out: can't write in .*: Read-only file system; give another folder"):
        folder.require_usable(tmp_path / "x" / "y")


def test_looking_at_a_folder_leaves_no_trace(tmp_path):
    folder.require_usable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    write_study(tmp_path / "study", make_plan(arms=("bf16",), seeds=(0,)))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    folder.require_usable(tmp_path / "study")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "said"),
    [("report", "report is a file, where a study keeps its report"), ("evaluations", "keeps its evaluations")],
)
def test_a_file_where_a_folder_should_be(name, said, tmp_path, capsys):
    write_study(tmp_path, make_plan(arms=("bf16",), seeds=(0,)))
    if (tmp_path / name).is_dir():
        (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).write_text("")
    (tmp_path / "about.json").write_text("{}")
    for given in (["--out", str(tmp_path)], ["--report", "--out", str(tmp_path)]):
        line = wrong(*given, capsys=capsys)
        assert line.startswith(f"--out: {tmp_path / name} is a file") and said in line


def test_a_folder_where_a_file_should_be(tmp_path, capsys):
    (tmp_path / "plan.json").mkdir()
    assert "plan.json is a folder, where a study has a file" in wrong("--out", str(tmp_path), capsys=capsys)


def test_other_errors_of_the_file_system_say_what_to_do(tmp_path, monkeypatch, capsys):
    def full(args):
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(cli, "run", full)
    assert wrong(capsys=capsys) == f"{tmp_path / 'x'}: No space left on device; make room there, or give another --out"


def test_a_home_of_nobody(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--out", "~nosuchuser"])
    assert ended.value.code == cli.WRONG
    assert "argument --out: ~nosuchuser: there is no such user; write out what ~ stands for" in capsys.readouterr().err
