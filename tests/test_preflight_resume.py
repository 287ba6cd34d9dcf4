"""The checkpoint to resume from: what is refused before Ray starts, and what is said about other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import open_dict
from support_preflight import changed, compose_config, of

from quads_ops.settings import QuadsSettings, SettingsError
from quads_recipe import derive, preflight_resume
from quads_recipe.alarms import FILE, Alarms


@pytest.fixture(scope="module")
def base():
    return compose_config((Path("model"), Path("data.parquet")))


def settings(**block) -> QuadsSettings:
    return QuadsSettings.from_dict(block)


def save(root: Path, step: int, devices: int = 1, **block) -> Path:
    """A checkpoint as verl 0.9.1 and the trainer leave it."""
    folder = root / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    for name in preflight_resume.FILES.values():
        for rank in range(devices):
            torch.save({"w": torch.ones(1000)}, folder / "actor" / name.format(devices, rank))
    torch.save({"state": 1}, folder / "data.pt")
    Alarms(settings(**block)).save(folder)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.fixture
def resumed(base, tmp_path):
    """A checkpoint of steps 1 and 2, and what the check says about a run over them."""
    for step in (1, 2):
        save(tmp_path, step)

    def check(mode="auto", path=None, block=None, **values) -> list[str]:
        trainer = {"resume_mode": mode, "resume_from_path": path, "default_local_dir": str(tmp_path)}
        config = changed(changed(base, **of("trainer.", **trainer)), **values)
        return preflight_resume.check(config, settings(**(block or {})))

    return check


def test_a_whole_checkpoint_passes(resumed, tmp_path):
    assert resumed() == [] == resumed("disable")
    assert resumed("resume_path", str(tmp_path / "global_step_1")) == []
    assert resumed("resume_path", str(tmp_path / "global_step_1") + "/") == []
    assert resumed("resume_path", "hdfs://host/global_step_1") == []


def test_verl_gets_a_path_that_ends_with_the_number(base, tmp_path):
    """It takes all that follows global_step_ for a number, and a shell completes folders with a slash."""
    given = {"resume_mode": "resume_path", "resume_from_path": f"{tmp_path}/global_step_1/"}
    config = changed(base, **of("trainer.", **given))
    with open_dict(config):
        derive._write(config, settings())
    assert int(config.trainer.resume_from_path.split("global_step_")[-1]) == 1


def test_nothing_to_resume_from(resumed, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert resumed() == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    [line] = resumed()
    assert line.startswith("warning: ") and "global_step_7 is the latest" in line and "training starts anew" in line
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("two")
    with pytest.raises(SettingsError, match=r"trainer.resume_mode = 'auto': .*iteration.txt holds 'two', not a step"):
        resumed()


FULL = [
    "actor/model_world_size_1_rank_0.pt",
    "actor/optim_world_size_1_rank_0.pt",
    "actor/extra_state_world_size_1_rank_0.pt",
    "data.pt",
]


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_file_that_was_cut_off_is_named(resumed, tmp_path, name, mode):
    path = str(tmp_path / "global_step_2")
    file = tmp_path / "global_step_2" / name
    whole = file.read_bytes()
    field = {"auto": "trainer.resume_mode = 'auto'", "resume_path": f"trainer.resume_from_path = {path!r}"}[mode]
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(SettingsError) as caught:
            resumed(mode, path)
        text = str(caught.value)
        assert text.startswith(f"{field}: {file} ") and ("is empty" if size == 0 else "cut off") in text
        assert f"resume_path trainer.resume_from_path={tmp_path / 'global_step_1'})" in text
        assert "trainer.resume_mode=disable" in text
    assert resumed("resume_path", str(tmp_path / "global_step_1")) == resumed("disable") == []


def test_a_file_that_is_missing_is_named(resumed, tmp_path):
    (tmp_path / "global_step_2" / FULL[1]).unlink()
    with pytest.raises(SettingsError, match="global_step_2/actor/optim_world_size_1_rank_0.pt is missing"):
        resumed()
    # verl does not load it, or another machine has it.
    assert resumed(actor_rollout_ref__actor__checkpoint__load_contents=["model", "extra"]) == []
    assert resumed(trainer__nnodes=2, trainer__n_gpus_per_node=1, **{"trainer__resume_mode": "disable"}) == []
    assert resumed(ray_kwargs__ray_init__address="host:6379") == []
    (tmp_path / "global_step_2" / "data.pt").unlink()
    with pytest.raises(SettingsError, match="optim_world_size_1_rank_0.pt is missing"):
        resumed()


def test_one_node_of_two_has_its_own_part(resumed, tmp_path):
    folder = save(tmp_path, 3, devices=2)
    assert resumed(trainer__nnodes=2) == [] == resumed(trainer__n_gpus_per_node=2)
    (folder / "actor" / "model_world_size_2_rank_1.pt").unlink()
    assert resumed(trainer__nnodes=2) == []
    with pytest.raises(SettingsError, match="model_world_size_2_rank_1.pt is missing"):
        resumed(trainer__n_gpus_per_node=2)


def test_another_number_of_devices(resumed, tmp_path):
    with pytest.raises(SettingsError, match="global_step_2 was written by 1 devices, and this run has 4"):
        resumed(trainer__n_gpus_per_node=4)


def test_other_settings_are_said(resumed, tmp_path):
    save(tmp_path, 3, arm="bf16")
    [line] = resumed()
    assert line.startswith(f"warning: resuming {tmp_path / 'global_step_3'} with other settings: quads.arm was 'bf16'")
    for field in (
        "quads.arm was 'bf16' and is 'quads'",
        "quads.actor.mode was 'none' and is 'w4a16'",
        "quads.rollout.mode was 'bf16' and is 'w4a4'",
        "quads.rollout.residual.ratio was 0.0 and is 0.5",
    ):
        assert field in line
    assert line.endswith("; the alarms take a new baseline of |d|") and "granularity" not in line
    assert resumed(block={"arm": "bf16"}) == []
    [line] = resumed(block={"arm": "bf16", "alarms": {"window": 3}})
    assert line.endswith("with other settings: quads.alarms.window was 5 and is 3")


def test_a_checkpoint_that_does_not_tell_its_settings(resumed, tmp_path):
    file = tmp_path / "global_step_2" / FILE
    state = json.loads(file.read_text())
    del state["settings"]
    file.write_text(json.dumps(state))
    assert resumed(block={"arm": "bf16"}) == []
    file.unlink()
    assert resumed(block={"arm": "bf16"}) == []
    for broken in ('{"baseline": [0.1', "", "[]"):
        file.write_text(broken)
        with pytest.raises(SettingsError, match="quads_alarms.json can't be read .*; remove it"):
            resumed()
