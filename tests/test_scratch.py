"""Folders of temporary files: private, gone at the end, and after a kill at the next start of anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
from support_wait import eventually

from quads_recipe import cli, scratch

OWNER = """
    import os, subprocess, sys, time
    from quads_recipe import scratch
    with scratch.made() as folder:
        child = subprocess.Popen(["sleep", "600"], env={**os.environ, "TMPDIR": str(folder)}) if sys.argv[1:] else None
        print(folder, child.pid if child else 0, flush=True)
        time.sleep(600)
"""


@pytest.fixture
def temporary(short_dir, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_dir))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return short_dir


def owner(*arguments):
    command = [sys.executable, "-c", textwrap.dedent(OWNER), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    folder, child = process.stdout.readline().split()
    return process, os.path.basename(folder), int(child)


def test_a_folder_is_private_and_gone_at_the_end(temporary):
    with scratch.made() as folder:
        assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("c")
    with pytest.raises(RuntimeError), scratch.made():
        raise RuntimeError
    assert not list(temporary.iterdir())


def test_an_interrupted_owner_leaves_nothing(temporary):
    process, folder, _ = owner()
    assert (temporary / folder).is_dir()
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert not list(temporary.iterdir())


def test_a_killed_owners_folder_is_removed_by_the_next_start_and_a_living_ones_is_not(temporary):
    killed, gone, _ = owner()
    living, kept, _ = owner()
    try:
        killed.kill()
        killed.wait()
        assert (temporary / gone).is_dir()
        with scratch.made() as own:
            assert sorted(path.name for path in temporary.iterdir()) == sorted([kept, own.name])
    finally:
        living.send_signal(signal.SIGINT)
        living.wait(30)
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_owner_stays_while_a_process_of_it_is_left(temporary):
    killed, folder, child = owner("with a child")
    killed.kill()
    killed.wait()
    try:
        scratch.sweep(scratch.PREFIX)
        assert (temporary / folder).is_dir()
    finally:
        os.kill(child, signal.SIGKILL)

    def swept():
        scratch.sweep(scratch.PREFIX)
        return not (temporary / folder).exists()

    assert eventually(swept, seconds=20)


def test_what_others_have_there_is_left_alone(temporary):
    """Folders of that name without a note of an owner, files, links, and other names."""
    (temporary / "qd-mine").mkdir()
    (temporary / "qd-file").write_text("")
    target = temporary / "other"
    target.mkdir()
    (target / scratch.OWNER).write_text("")
    (temporary / "qd-link").symlink_to(target)
    before = sorted(temporary.rglob("*"))
    with scratch.made():
        pass
    assert sorted(temporary.rglob("*")) == before


def test_a_tmpdir_too_long_for_rays_sockets_is_refused(temporary, monkeypatch):
    longest = "/tmp/" + "x" * (scratch.ROOM - 5)
    monkeypatch.setattr(tempfile, "tempdir", longest)
    scratch.require_room()
    deepest = (
        f"{longest}/{scratch.PREFIX}1234/quads-12345678/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
    )
    assert len(deepest) == 107
    monkeypatch.setattr(tempfile, "tempdir", longest + "x")
    with pytest.raises(scratch.ScratchError, match=f"TMPDIR: {longest}x has {scratch.ROOM + 1} bytes.*such as /tmp"):
        scratch.require_room()


def test_on_a_gpu_rays_folder_stays_where_it_is():
    """There a cluster that runs already is found."""
    assert scratch.environment("/s", {"VERL_PLATFORM": "cpu", "TMPDIR": "/t"}) == {"TMPDIR": "/s"}
    assert scratch.environment("/s", {"TMPDIR": "/t"}) == {"TMPDIR": "/s", "RAY_TMPDIR": "/t"}
    assert scratch.environment("/s", {}) == {"TMPDIR": "/s", "RAY_TMPDIR": "/tmp"}
    assert scratch.environment("/s", {"TMPDIR": "/t", "RAY_TMPDIR": "/r"})["RAY_TMPDIR"] == "/r"


def test_compiled_code_is_shared_for_a_while_or_lies_where_the_caller_says(temporary, monkeypatch):
    monkeypatch.delenv(scratch.COMPILED, raising=False)
    with scratch.compiled():
        assert os.path.dirname(os.environ[scratch.COMPILED]) == str(temporary)
    assert scratch.COMPILED not in os.environ and not list(temporary.iterdir())
    monkeypatch.setenv(scratch.COMPILED, "/mine")
    with scratch.compiled():
        assert os.environ[scratch.COMPILED] == "/mine"


def test_a_tmpdir_without_room_for_a_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(scratch.COMPILED, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert cli.main(["study", "--help"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quads: TMPDIR: no folder can be made there (") and str(tmp_path / "none") in said


def test_runs_share_what_torch_compiles_although_importing_it_settles_where(temporary):
    """As in `quads study`, whose checks import torch."""
    script = """
        import os, sys
        from quads_recipe import cli
        from quads_recipe.study import cli as study

        def main(argv):
            from torch._inductor.runtime.cache_dir_utils import cache_dir
            print(cache_dir(), os.listdir(os.environ["TMPDIR"]))
            return 0

        study.main = main
        sys.exit(cli.main(["study"]))
    """
    environment = {name: value for name, value in os.environ.items() if name != scratch.COMPILED}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    [folder] = [part.strip("[]'") for part in found[1:]]
    assert found[0] == f"{temporary}/{folder}" and not list(temporary.iterdir())


@pytest.mark.parametrize("raises", [False, True])
def test_a_command_with_an_engine_leaves_tmpdir_as_it_was(temporary, monkeypatch, raises):
    def command(argv):
        path = tempfile.mkdtemp()
        assert os.path.dirname(os.path.dirname(path)) == str(temporary) and os.environ["TMPDIR"] in path
        os.environ[scratch.COMPILED] = path
        if raises:
            raise KeyboardInterrupt
        return 3

    monkeypatch.delenv(scratch.COMPILED, raising=False)
    monkeypatch.setattr("quads_recipe.diagnose.main", command)
    if raises:
        with pytest.raises(KeyboardInterrupt):
            cli.main(["diagnose"])
    else:
        assert cli.main(["diagnose"]) == 3
    assert not list(temporary.iterdir())
    assert os.environ["TMPDIR"] == str(temporary) == tempfile.gettempdir() and scratch.COMPILED not in os.environ
