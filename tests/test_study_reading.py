"""Damaged files of a study: one line that names the file, the field, its value and the remedy; no false alarms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_study import about, make_plan, write_study
from test_study_runner import study as runner_of

from quads_recipe.study import cli, compare, plan, results
from quads_recipe.study.layout import Layout
from quads_recipe.study.reading import StudyError, read_object, text

COMMITTED = sorted((Path(__file__).parents[1] / "docs" / "study").glob("*/results.json"))
DONE, FAILED, OWN = "runs/quads-seed0/done.json", "runs/bf16-seed1/failed.json", "evaluations/quads-seed0-own.json"
METRICS, TRAINER = "runs/quads-seed0/metrics-1.jsonl", "runs/bf16-seed1/trainer.json"
FILES = ("plan.json", "about.json", DONE, OWN, "evaluations/start-bf16.json")


@pytest.fixture
def damaged(tmp_path, capsys):
    """A function: what `quads study --report` says of a study once a file of it was changed."""
    layout = write_study(tmp_path / "s", make_plan(arms=("bf16", "quads"), seeds=(0, 1), heldout=16, steps=6))
    (layout.study / "about.json").write_text(json.dumps(about()))
    (layout.run("bf16", 1).folder / "done.json").unlink()

    def report(name, content, status=cli.WRONG):
        file = layout.study / name
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.read_bytes() if file.is_file() else None
        if content is None:
            file.unlink(missing_ok=True)
            file.mkdir()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert cli.main(["--report", "--out", str(layout.study)]) == status
        said = capsys.readouterr()
        if content is None:
            file.rmdir()
        if before is None:
            file.unlink(missing_ok=True)
        else:
            file.write_bytes(before)
        return said.err if status else said.out

    report.layout = layout
    return report


def one_line(said, *parts):
    assert len(said.splitlines()) == 1 and "Traceback" not in said, said
    for part in parts:
        assert part in said


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_json_is_named(damaged, name):
    contents = {
        b"": "is empty",
        b'{"seconds": 1': "no JSON (",
        b"\xff\xfe": "byte 0 is no UTF-8",
        b"[" * 100_000: "nested too deeply",
        b'{"seconds": ' + b"9" * 5000 + b"}": "no JSON (",
        b'{"a": "\\ud800"}': "half of a surrogate pair",
        b"[1]": "holds no JSON object but [1]",
    }
    for content, reason in contents.items():
        one_line(damaged(name, content), f"{damaged.layout.study / name}: is broken, ", reason, ";")


@pytest.mark.parametrize("name", [DONE, OWN, METRICS])
def test_a_folder_in_place_of_a_file(damaged, name):
    one_line(damaged(name, None), f"{damaged.layout.study / name}: is broken, a folder and no file", "; remove ")


def edited(layout, name, **changes):
    return json.dumps(json.loads((layout.study / name).read_text()) | changes)


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("plan.json", "arms", ["bf16", "quad"], 'arms[1] is "quad", must be one of bf16, '),
        ("plan.json", "arms", ["bf16", "bf16"], 'arms[1] is "bf16", must be there once'),
        ("plan.json", "seeds", "01", 'seeds is "01", must be a list'),
        ("plan.json", "seeds", [0, 1.5], "seeds[1] is 1.5, must be a whole number"),
        ("plan.json", "steps", 0, "steps is 0, must be a whole number of at least 1"),
        ("plan.json", "outliers", {"strength": "x"}, 'outliers.strength is "x", must be a finite number'),
        ("plan.json", "terms", [3], "terms is [3], must be a list of 2"),
        ("plan.json", "keep_weights", 1, "keep_weights is 1, must be true or false"),
        ("plan.json", "versions", [1], "versions is [1], must be a JSON object"),
        ("about.json", "machine", None, "machine is null, must be a JSON object"),
        ("about.json", "machine", {}, "machine has no processor, cores"),
        ("about.json", "date", 5, "date is 5, must be a text"),
        ("about.json", "outliers", [1], "outliers is [1], must be a JSON object"),
        (DONE, "seconds", "210", 'seconds is "210", must be a finite number'),
        (DONE, "seconds", True, "seconds is true, must be a finite number"),
        (DONE, "seconds", 10**400, "must be a finite number"),
        (DONE, "code", ["c"], 'code is ["c"], must be a text'),
        (OWN, "pass_at_1", float("nan"), "pass_at_1 is NaN, must be a finite number"),
        (OWN, "pass_at_1", 0.123, "pass_at_1 is 0.123, and the mean of per_problem is "),
        (OWN, "per_problem", {}, "per_problem is {}, must be a list of 1 or more"),
        (OWN, "per_problem", [0.5, None], "per_problem[1] is null, must be a finite number"),
        (OWN, "per_problem", [0.5], "per_problem has 1 scores of 16 problems"),
        (OWN, "mode", 4, "mode is 4, must be a text"),
        (OWN, "ratio", -1, "ratio is -1, must be at least 0"),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_its_value(damaged, name, field, value, said):
    line = damaged(name, edited(damaged.layout, name, **{field: value}))
    one_line(line, f"{damaged.layout.study / name}: is broken, ", said)
    assert any(remedy in line for remedy in ("; remove it, and", "; give another --out", "; start the study again"))


def test_evaluations_of_fewer_or_too_many_problems_are_named(damaged):
    for count, said in ((4, "has 4 scores, others have 16"), (20, "has 20 scores of 16 held-out problems")):
        content = edited(damaged.layout, OWN, per_problem=[0.5] * count, pass_at_1=0.5, problems=count)
        if count < 16:
            one_line(damaged(OWN, content), f"{damaged.layout.study / OWN}: is broken, per_problem {said}", "remove it")
    for file in damaged.layout.evaluations.iterdir():
        name = f"evaluations/{file.name}"
        file.write_text(edited(damaged.layout, name, per_problem=[0.5] * 20, pass_at_1=0.5, problems=20))
    one_line(damaged("data/any", ""), "per_problem has 20 scores of 16 held-out problems")


def test_metrics_that_lack_a_step_have_one_twice_or_hold_no_number(damaged):
    lines = (damaged.layout.study / METRICS).read_text().splitlines()
    folder = (damaged.layout.study / METRICS).parent
    remedy = f"remove {folder / 'done.json'}, and the same command trains this run again"
    for content, said in (
        (lines[:-1], "step 6 is missing: they hold 5 steps, and done.json says that all 6 are done"),
        ([*lines[:-1], lines[-1][:40]], "step 6 is missing"),
        ([*lines[:2], *lines[3:]], "step 3 is missing"),
        ([], "step 1 is missing: they hold 0 steps"),
        ([*lines, lines[-1].replace('"step": 6', '"step": 7')], "step 7 is too many"),
    ):
        one_line(
            damaged(METRICS, "\n".join(content)), f"{folder}: its metrics-*.jsonl are broken, {said}", "remove done"
        )
    text = json.dumps({"step": 6, "data": {"critic/score/mean": "much"}})
    for content, said in (
        ([*lines, lines[2]], "line 7 has the reward of step 3 again"),
        ([*lines[:-1], text], 'line 6, step 6: critic/score/mean is "much", must be a number'),
        ([*lines[:-1], text.replace('"much"', "9" * 400)], "line 6, step 6: critic/score/mean is 999"),
        ([*lines[:-1], text.replace('"much"', "[1]")], "line 6, step 6: critic/score/mean is [1], must be a number"),
    ):
        one_line(damaged(METRICS, "\n".join(content)), f"{damaged.layout.study / METRICS}: is broken, {said}", remedy)
    strange = [
        "[" * 100_000,
        '{"step": 1e400, "data": {}}',
        '{"step": ' + "9" * 5000 + "}",
        '{"step": 1, "data": [[1]]}',
    ]
    damaged(METRICS, "\n".join([*lines, *strange]), status=0)  # lines of something else, as always
    damaged("runs/quads-seed0/metrics-old.jsonl", "x", status=0)


def test_rewards_without_a_finite_value_are_noted(damaged):
    lines = (damaged.layout.study / METRICS).read_text().splitlines()
    data = {"critic/score/mean": float("nan"), "quads/logprob_abs_diff_mean": 0.01}
    lines[1] = json.dumps({"step": 2, "data": data})
    note = "quads seed 0: no finite reward in 1 of 6 steps (first step 2), which are left out of its means"
    assert f"note: {note}" in damaged(METRICS, "\n".join(lines), status=0)
    assert note in (damaged.layout.report / "study.html").read_text()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"cause": "fell over"}', '{"cause": [1]}', '{"cause": ["a"], "code": []}', None]
)
def test_a_damaged_note_of_a_failure_is_only_told(damaged, content):
    said = damaged(FAILED, content, status=0)
    assert "note: bf16-seed1/failed.json: is broken, " in said and "the same command tries it again" in said
    for file in damaged.layout.report.iterdir():
        assert file.suffix == ".png" or str(damaged.layout.study) not in file.read_text()


@pytest.mark.parametrize("content", ["{", None])
@pytest.mark.parametrize("save_every", [0, 1])
def test_a_run_whose_note_of_a_failure_is_damaged_is_trained(tmp_path, content, save_every):
    run = Layout(tmp_path).run("bf16", 0)
    runner, layout, asked, out = runner_of(tmp_path, save_every=save_every, arms=("bf16",), seeds=(0,))
    (run.folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    if content is None:
        (run.folder / "failed.json").mkdir()
    else:
        (run.folder / "failed.json").write_text(content)
    with runner.display:
        assert [done for _, done in runner.train(layout.runs(asked))] == [True]
    assert "bf16-seed0/failed.json: is broken" in out.getvalue() and not (run.folder / "failed.json").exists()


@pytest.mark.parametrize("name", [DONE, OWN, METRICS, TRAINER])
def test_a_start_says_so_before_it_trains(tmp_path, name):
    layout = write_study(tmp_path, make_plan(arms=("bf16", "quads"), seeds=(0, 1), steps=4, heldout=16))
    runner_of(tmp_path, heldout=16)
    (tmp_path / name).write_text('{"pid": 1, "started": "x"}')
    with pytest.raises(StudyError, match=f"{name.split('/')[1]}.*(is broken|are broken)"):
        runner_of(tmp_path, heldout=16)
    assert layout.run("quads", 1).done()


@pytest.mark.parametrize(
    "facts", [{"pid": "12", "started": 1.0}, {"pid": -1, "started": 1.0}, {"pid": 2**40, "started": 1}, {"pid": 12}]
)
def test_a_damaged_note_of_a_trainer_is_named_and_ends_nothing(tmp_path, facts):
    from quads_recipe.study import leftover

    (tmp_path / leftover.FILE).write_text(json.dumps(facts))
    with pytest.raises(StudyError, match=r"trainer\.json: is broken.*end that one if it still runs.*remove the file"):
        leftover.end(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["plan"].update(steps=None), "plan.steps is null, must be a whole number"),
        (lambda r: r["plan"].update(stress=5), "plan.stress is 5, must be a list"),
        (lambda r: r["about"].update(outliers={"strength": "x"}), 'about.outliers.strength is "x"'),
        (lambda r: r.update(arms={"bf16": 1}), 'arms is {"bf16": 1}, must be a list'),
        (lambda r: r["arms"].append("quads"), 'arms[7] is "quads", must be a JSON object'),
        (lambda r: r["arms"][1].update(figures=[1]), "arms[1].figures is [1], must be a JSON object"),
        (lambda r: r["arms"][1]["figures"]["own"].update(mean="0.5"), 'arms[1].figures.own.mean is "0.5"'),
    ],
)
def test_damaged_results_are_named_before_they_are_compared(tmp_path, capsys, change, said):
    contents = json.loads(next(f for f in COMMITTED if f.parent.name == "paper-mini").read_text())
    change(contents)
    file = Layout(tmp_path / "s").report / "results.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(contents))
    assert cli.main(["--compare", str(tmp_path / "s"), "--out", str(tmp_path / "c")]) == cli.WRONG
    one_line(capsys.readouterr().err, f"{file}: is broken, {said}", "--report --out")


def test_the_committed_studies_are_compared_without_a_word(tmp_path):
    assert len(COMMITTED) >= 8
    for file in COMMITTED:
        there = tmp_path / file.parent.name / "report"
        there.mkdir(parents=True)
        (there / "results.json").write_bytes(file.read_bytes())
    lines = compare.write([tmp_path / file.parent.name for file in COMMITTED], tmp_path / "c")
    assert len(lines) > 20
    # A copy of a report needs no study around it.
    assert compare.write([file.parent for file in COMMITTED], tmp_path / "c") == lines


def test_a_figure_without_a_number_has_no_gap():
    figures = {"own": {"mean": None, "n": 1}}
    found = {"plan": {"policy": "p", "stress": [], "steps": 1}, "about": {}, "arms": []}
    found["arms"] = [{"arm": arm, "figures": figures} for arm in ("bf16", "quads")]
    assert [row["own_gap"] for row in compare.rows_of(found)] == [None, None]


def test_a_message_is_one_line_and_short(tmp_path):
    (tmp_path / "f").write_text(json.dumps({"a": "line\nline\x1b[31m" + "x" * 500}))
    with pytest.raises(StudyError) as error:
        read_object(tmp_path / "f", "remove it", {"a": lambda value, where: text(5, where), "b": text})
    assert "has no b" in str(error.value)
    from quads_recipe.study.reading import number

    with pytest.raises(StudyError) as error:
        read_object(tmp_path / "f", "remove it", {"a": number})
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value) and len(str(error.value)) < 250


def test_a_whole_study_is_read_without_a_word(tmp_path):
    layout = write_study(tmp_path, make_plan(seeds=(0,)))
    found = results.load(tmp_path)
    assert results.notes(found) == [] and len(found.final) == 7 and layout.study == tmp_path
    assert plan.read(tmp_path) == make_plan(seeds=(0,))
