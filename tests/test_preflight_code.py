"""The user's own code, which verl loads by file and name: both must be there; it is read, never run."""

import pytest
from support_preflight import changed, compose_config, of, save_inputs

from quads_ops.settings import SettingsError
from quads_recipe import preflight_code

REWARD = "reward.custom_reward_function."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return compose_config(save_inputs(tmp_path_factory.mktemp("code")))


def refused(config, start, message, **given):
    with pytest.raises(SettingsError) as caught:
        preflight_code.check(changed(config, **given))
    assert str(caught.value).startswith(start) and message in str(caught.value), caught.value
    assert "\n" not in str(caught.value)


# what is in the file, and whether it may define compute_score
SOURCES = {
    "function": ("def compute_score(*a): return 0", True),
    "coroutine": ("async def compute_score(*a): return 0", True),
    "class": ("class compute_score: pass", True),
    "assigned": ("compute_score = lambda *a: 0", True),
    "imported": ("from mine import score as compute_score", True),
    "conditional": ("try:\n    import fast\nexcept ImportError:\n    def compute_score(*a): return 0", True),
    "star": ("from mine import *", True),
    "made": ("globals()['compute_' + 'score'] = print", True),
    "lazy": ("def __getattr__(name): return print", True),
    "none": ("def score(*a): return 0\nraise SystemExit('it was run')", False),
    "text": ("'compute_score'  # compute_score", False),
    "empty": ("", False),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_file_with_and_without_the_function(config, tmp_path, case):
    source, there = SOURCES[case]
    (tmp_path / "mine.py").write_text(source)
    given = of(REWARD, path=str(tmp_path / "mine.py"), name="compute_score")
    if there:
        preflight_code.check(changed(config, **given))
        return
    refused(config, f"{REWARD}name = 'compute_score': mine.py has nothing of this name", "", **given)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such.py", "no such file; give a Python file"),
        ("~/mine.py", "write out what ~ stands for"),
        ("file://no/such.py", "no such file"),
        ("pkg://no_such_module", "no such module as no_such_module"),
        ("pkg://no_such.module", "no such module: No module named 'no_such'"),
        (".", "no such file"),
        ("", "no file; give a Python file"),
        (5, "no file; give a Python file"),
    ],
)
def test_files_that_are_not_there(config, path, message):
    refused(config, f"{REWARD}path = {path!r}: ", message, **of(REWARD, path=path))


def test_files_that_are_no_python(config, tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(:")
    refused(config, f"{REWARD}path = ", "is no Python that can be read: ", **of(REWARD, path=str(tmp_path / "mine.py")))
    (tmp_path / "mine.txt").write_text("")
    refused(config, f"{REWARD}path = ", "is no Python file", **of(REWARD, path=str(tmp_path / "mine.txt")))


def test_every_place_for_own_code(config):
    preflight_code.check(config)
    for place in ("custom_reward_function.", REWARD, "data.custom_cls.", "trainer.v1.sampler.custom_sampler."):
        refused(config, f"{place}path = 'no.py': ", "no such file", **of(place, path="no.py", name="any"))
        refused(
            config, f"{place}name = None: ", f"name what to take of {place}path", **of(place, path=__file__, name=None)
        )
    manager = of("reward.reward_manager.", source="importlib", name="Missing")
    refused(config, "reward.reward_manager.module.path = None: ", "no file", **manager)
    at = of("reward.reward_manager.module.", path=__file__)
    refused(config, "reward.reward_manager.name = 'Missing': ", "nothing of this name", **manager, **at)
    preflight_code.check(changed(config, **of("", **{"reward.reward_manager.module.path": "no.py"})))  # not importlib


def test_the_projects_own_pass(config):
    preflight_code.check(changed(config, **of(REWARD, path="pkg://quads_recipe.reward", name="compute_score")))
    preflight_code.check(changed(config, **of(REWARD, path="pkg://quads_recipe/reward", name="compute_score")))
    refused(
        config,
        f"{REWARD}name = 'score'",
        "reward.py has nothing",
        **of(REWARD, path="pkg://quads_recipe.reward", name="score"),
    )
