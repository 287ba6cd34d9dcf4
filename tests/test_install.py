"""The tools behind `make venv` and `make lock`, on wheels made here: no index is asked."""

import sys
import zipfile
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"


@pytest.fixture(scope="module", autouse=True)
def _requirements_on_path():
    sys.path.insert(0, str(REQUIREMENTS))
    yield
    sys.path.remove(str(REQUIREMENTS))


@pytest.fixture
def install():
    import install

    return install


@pytest.fixture
def lock():
    import lock

    return lock


def make_wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name.replace('-', '_')}.py", "x = 1\n")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip sees."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


# --- install.py


@pytest.fixture
def site(tmp_path, monkeypatch, install) -> Path:
    """A site-packages folder with one whole package, demo 1.0; install.py sees nothing else."""
    folder = tmp_path / "site"
    info = folder / "demo-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "demo.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    (info / "RECORD").write_text("demo.py,,6\ndemo-1.0.dist-info/METADATA,,\n__pycache__/demo.cpython-311.pyc,,9\n")
    real = install.metadata.distributions
    monkeypatch.setattr(install.metadata, "distributions", lambda: real(path=[str(folder)]))
    return folder


def test_whole_package_is_left_alone(install, site):
    assert install.broken({"demo": "1.0"}) == {}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda site: (site / "demo.py").unlink(), "lacks demo.py"),
        (lambda site: (site / "demo.py").write_text("x"), "lacks demo.py"),
        (lambda site: (site / "demo-1.0.dist-info" / "RECORD").unlink(), "lacks RECORD"),
        (lambda site: (site / "demo-1.0.dist-info").rename(site / "gone"), "absent"),
    ],
    ids=["file absent", "file cut short", "list absent", "metadata absent"],
)
def test_half_written_package_is_found(install, site, damage, what):
    damage(site)
    assert install.broken({"demo": "1.0"}) == {"demo": what}


def test_other_version_is_found(install, site):
    assert install.broken({"demo": "1.1"}) == {"demo": "is 1.0"}


def test_cpu_build_of_torch_is_accepted(install, wheels):
    make_wheel(wheels, "torch", "2.13.0+cpu", "sympy")
    install.refuse_cuda_build("torch==2.13.0", [])


def test_cuda_build_of_torch_is_refused_before_download(install, wheels):
    make_wheel(wheels, "torch", "2.13.0", "sympy", "nvidia-cublas")
    with pytest.raises(install.InstallError, match="(?s)CUDA build.*TORCH_INDEX="):
        install.refuse_cuda_build("torch==2.13.0", [])


def test_index_with_a_cpu_build_is_preferred(install, wheels, tmp_path):
    make_wheel(wheels, "torch", "2.13.0", "nvidia-cublas")
    other = tmp_path / "other"
    other.mkdir()
    make_wheel(other, "torch", "2.13.0+cpu")
    install.refuse_cuda_build("torch==2.13.0", ["--find-links", str(other)])


def test_absent_torch_says_where_to_get_it(install, wheels):
    with pytest.raises(install.InstallError, match="(?s)pip finds no torch==2.13.0.*TORCH_INDEX="):
        install.refuse_cuda_build("torch==2.13.0", [])


def test_failing_pip_is_reported_with_its_words(install, wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "LOG", tmp_path / "log")
    with pytest.raises(install.InstallError, match="(?s)could not install thing.*no-such-package"):
        install.pip_install(["no-such-package==1.0"], "thing")
    assert "no-such-package" in (tmp_path / "log").read_text()


def test_install_refuses_the_systems_python(install, monkeypatch, capsys):
    monkeypatch.setattr(install.sys, "prefix", install.sys.base_prefix)
    assert install.main([]) == 1
    assert "make venv" in capsys.readouterr().err


# --- lock.py


@pytest.fixture
def project(wheels, tmp_path) -> Path:
    """app 1 needs lib (1.0 and 1.1 exist) and audio, which no index has."""
    make_wheel(wheels, "app", "1.0", "lib", "audio")
    make_wheel(wheels, "lib", "1.0")
    make_wheel(wheels, "lib", "1.1")
    (tmp_path / "x.in").write_text("app==1.0\n# left out: audio\n")
    return tmp_path


def lock_main(lock, folder: Path, *arguments: str) -> int:
    return lock.main(["--input", str(folder / "x.in"), "--lock", str(folder / "x.lock"), *arguments])


def test_lock_resolves_without_what_is_left_out(lock, project):
    assert lock_main(lock, project) == 0
    assert (project / "x.lock").read_text() == lock.HEADER + "app==1.0\nlib==1.1\n"


def test_lock_keeps_versions_until_asked(lock, project, capsys):
    (project / "x.lock").write_text("app==1.0\nlib==1.0\n")
    assert lock_main(lock, project, "--check") == 0
    assert "no change" in capsys.readouterr().out
    assert lock_main(lock, project, "--check", "--upgrade", "lib") == 1
    assert capsys.readouterr().out.splitlines() == ["-lib==1.0", "+lib==1.1"]
    assert lock_main(lock, project, "--upgrade") == 0
    assert "lib==1.1" in (project / "x.lock").read_text()


def test_lock_follows_a_pin_in_the_input(lock, project):
    (project / "x.lock").write_text("app==1.0\nlib==1.1\n")
    (project / "x.in").write_text("app==1.0\nlib==1.0\n# left out: audio\n")
    assert lock_main(lock, project) == 0
    assert "lib==1.0" in (project / "x.lock").read_text()


def test_lock_without_solution_ends_with_pips_words(lock, project):
    (project / "x.in").write_text("app==1.0\n")  # audio is wanted now
    with pytest.raises(SystemExit, match="(?s)no solution.*audio"):
        lock_main(lock, project)


def test_upgrade_of_an_unknown_name_is_an_error(lock, project):
    with pytest.raises(SystemExit, match="not in the lock: nothing"):
        lock_main(lock, project, "--upgrade", "nothing")
