"""From the folder of a study to its figures, tables, drawings and page; synthetic runs whose figures are known."""

from __future__ import annotations

import csv
import json
import re
import statistics

import pytest
from support_browser import SCHEMES, dump_with, needs_browser, screenshot
from support_study import WORLD, about, make_plan, write_evaluation, write_run, write_study

from quads_recipe.diagnose_plots import ARM_COLORS
from quads_recipe.study import cli, collect, html, plots, report, results
from quads_recipe.study.layout import Layout
from quads_recipe.study.plan import to_json


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "s"
    write_study(folder)
    return folder, report.write(folder, about())


def look(folder):
    """(contents of results.json, the page without drawings), which cost most of a report."""
    found = results.contents(results.load(folder), about() | {"seconds": 60.0})
    return found, html.page(found, {})


def arm(found, name):
    return next(a for a in found["arms"] if a["arm"] == name)["figures"]


def line(step, **data):
    return json.dumps({"step": step, "data": data})


# --- collecting


def test_a_runs_summary_by_hand(tmp_path):
    rewards = [0.1, 0.3, 0.2, 0.6, 0.5, 0.4]
    names = {"critic/score/mean": rewards, "timing_s/step": [30, 5, 6, 7, 8, 9]}
    lines = [line(i + 1, **{name: many[i] for name, many in names.items()}) for i in range(6)]
    lines[3] = line(4, **{"critic/score/mean": 0.6, "quads/logprob_abs_diff_max": 2.0, "timing_s/step": 7})
    lines[4] = line(5, **{"critic/score/mean": 0.5, "quads/logprob_abs_diff_max": float("inf"), "timing_s/step": 8})
    lines.append(line(0, **{"val-core/x/reward/mean@1": 0.4}))
    (tmp_path / "m").write_text("\n".join(lines).replace("Infinity", "1e999") + '\n{"step": 7')
    steps = collect.steps([tmp_path / "m"])
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    found = collect.summary(steps)
    assert (found["reward_first"], found["reward_last"]) == pytest.approx((0.2, 0.45))
    assert (found["gain"], found["reward_best"], found["collapsed"]) == pytest.approx((0.25, 0.55, 0.0))
    assert found["seconds"] == 7 and found["reward"] == pytest.approx(0.35)
    assert found["d_max"] == found["d_max_ever"] == 2.0 and "d_mean" not in found
    assert collect.summary([]) == {}


def test_a_collapse_is_a_reward_below_half_of_its_best():
    def collapsed(rewards):
        return collect.summary([{"step": i, "reward": r} for i, r in enumerate(rewards)])["collapsed"]

    assert collapsed([0.4, 0.6, 0.6, 0.5, 0.2, 0.1]) == 1
    assert collapsed([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == collapsed([0.5, 0.4, 0.35, 0.3, 0.3, 0.3]) == 0


def test_attempts_are_sorted_as_numbers(tmp_path):
    run = Layout(tmp_path).run("quads", 0)
    run.folder.mkdir(parents=True)
    for attempt in (10, 2, 9):
        (run.folder / f"metrics-{attempt}.jsonl").write_text(line(1, **{"critic/score/mean": attempt / 10}))
    assert collect.steps(run.metrics_files())[0]["reward"] == 1.0


def test_curves_are_means_over_seeds_and_gaps_are_taken_seed_by_seed(tmp_path):
    plan = make_plan(arms=("bf16", "naive"), seeds=(0, 1), steps=3)
    rewards = {("bf16", 0): [0.5, 0.6, 0.7], ("bf16", 1): [0.1, 0.2, 0.3],
               ("naive", 0): [0.4, 0.5, 0.5], ("naive", 1): [0.1, 0.0, 0.3]}  # fmt: skip
    steps = {key: [{"step": i + 1.0, "reward": r} for i, r in enumerate(many)] for key, many in rewards.items()}
    found = results.Found(plan, [], steps)
    curve = results.curves(found, "reward")["bf16"]
    assert curve["step"] == [1, 2, 3] and curve["mean"] == pytest.approx([0.3, 0.4, 0.5]) and curve["n"] == [2, 2, 2]
    gaps = results.reward_gaps(found)
    assert list(gaps) == ["naive"] and gaps["naive"]["mean"] == pytest.approx([-0.05, -0.15, -0.1])
    assert gaps["naive"]["error"] == pytest.approx([0.05, 0.05, 0.1])
    smooth = results.reward_gaps(found, smooth=2)["naive"]
    seeds = [(-0.1, -0.1, -0.15), (0.0, -0.1, -0.1)]
    assert smooth["mean"] == pytest.approx([statistics.fmean(pair) for pair in zip(*seeds, strict=True)])


# --- results


def test_figures_come_back_with_their_errors_over_seeds(finished):
    folder, found = finished
    for name, (d, *_) in WORLD.items():
        spread = arm(found, name)["d_mean"]
        runs = [r["figures"]["d_mean"] for r in found["runs"] if r["arm"] == name]
        assert spread["n"] == 3 and spread["mean"] == pytest.approx(d, rel=0.03)
        assert spread["error"] == pytest.approx(statistics.stdev(runs) / 3**0.5)
    assert json.loads((folder / "report" / "results.json").read_text())["plan"]["steps"] == 24


def test_the_gap_before_training_is_apart_from_that_in_learning(finished):
    _, found = finished
    start = {row["arm"]: row for row in found["start"]}
    assert start["bf16"]["gap"] is None and start["naive"]["gap"]["unit"] == "problems"
    assert start["naive"]["gap"]["effect"] == pytest.approx(
        start["naive"]["own"]["mean"] - start["bf16"]["own"]["mean"]
    )
    assert start["qat"] | {"arm": "naive"} == start["naive"]  # the same engine
    table = html._heldout_table(found)
    own, plain = arm(found, "naive"), arm(found, "bf16")
    for side in ("own", "in_bf16"):
        assert f"{own[side]['mean'] - plain[side]['mean']:+.3f}" in table


def test_claims_of_a_known_world(finished):
    _, found = finished
    verdicts = {claim["name"]: claim["status"] for claim in found["claims"]}
    for name in ("ordering", "qat_weight", "rac", "largest", "below_fp8", "symmetric", "naive_reward"):
        assert verdicts[name] == "shown", name
    assert verdicts["symmetric_qat"] == "contradicted here" and verdicts["naive_collapse"] == "contradicted here"
    assert "2 are contradicted" in html.headline(found)


BROKEN = {
    "done": ("runs/quads-seed0/done.json", {"arm": "quads"}, "has no seconds", "trains this run again"),
    "evaluation": ("evaluations/quads-seed0-own.json", {"mode": "w4a4", "ratio": 0}, "has no pass_at_1, per_problem",
                   "evaluates again"),
    "start": ("evaluations/start-bf16.json", {"mode": "bf16", "ratio": 0, "pass_at_1": 0, "per_problem": []},
              "per_problem is [], must be a list of 1 or more", "evaluates again"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_the_remedy(tmp_path, case, capsys):
    name, lacking, said, remedy = BROKEN[case]
    write_study(tmp_path, make_plan(arms=("bf16", "quads"), seeds=(0, 1)))
    (tmp_path / "about.json").write_text(json.dumps(about()))
    for content, reason in (("", "no JSON"), ('{"seconds": 1', "no JSON"), ("[1]", "holds no JSON object"),
                            (json.dumps(lacking), said)):  # fmt: skip
        (tmp_path / name).write_text(content)
        assert cli.main(["--report", "--out", str(tmp_path)]) == cli.WRONG
        err = capsys.readouterr().err
        assert f"{tmp_path / name}: is broken, {reason}" in err and remedy in err and len(err.splitlines()) == 1
    (tmp_path / name).unlink()
    assert cli.main(["--report", "--out", str(tmp_path)]) == 0


def test_lines_of_metrics_that_are_none_are_left_out(tmp_path):
    file = tmp_path / "metrics-1.jsonl"
    good = json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}}).encode()
    file.write_bytes(b"\n".join([b"5", b"{}", b'{"step": "x", "data": {}}', b'{"step": 2, "data": 3}', b"\xff", good]))
    assert [(step["step"], step["reward"]) for step in collect.steps([file])] == [(1, 0.5)]


def test_a_study_of_one_seed_has_figures_and_no_verdicts(tmp_path):
    write_study(tmp_path / "s", make_plan(arms=("bf16", "naive", "quads"), seeds=(0,)))
    found = report.write(tmp_path / "s", about())
    page = (tmp_path / "s" / "report" / "study.html").read_text()
    assert arm(found, "naive")["d_mean"]["error"] is None
    testable = {claim["name"] for claim in found["claims"] if claim["status"] != "not testable"}
    assert testable <= {"start_gap"}
    assert "no figure of quads_full" in page and "one seed" in page


def test_failed_and_missing_runs_are_shown_and_left_out(tmp_path):
    plan, layout = make_plan(arms=("bf16", "quads"), seeds=(0, 1)), Layout(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(plan))
    write_run(layout, plan, "bf16", 0)
    write_run(layout, plan, "quads", 0, done=False)
    layout.run("quads", 0).mark_failed({"attempt": 1, "seconds": 9.0, "cause": ["it <broke>", "ValueError: <b>"]})
    write_run(layout, plan, "bf16", 1, done=False)
    found, page = look(tmp_path)
    assert [(r["arm"], r["seed"], r["status"]) for r in found["runs"]] == [
        ("bf16", 0, "done"),
        ("quads", 0, "failed"),
        ("bf16", 1, "missing"),
        ("quads", 1, "missing"),
    ]
    assert arm(found, "bf16")["reward"]["n"] == 1 and not arm(found, "quads")
    assert "it &lt;broke&gt;<br>ValueError: &lt;b&gt;" in page and "<broke>" not in page
    assert "quads seed 0 (failed)" in page


def test_a_study_that_has_not_begun_has_a_report(tmp_path):
    (tmp_path / "plan.json").write_text(to_json(make_plan()))
    found = report.write(tmp_path, about())
    assert {run["status"] for run in found["runs"]} == {"missing"}
    assert "Nothing can be tested yet" in (tmp_path / "report" / "study.html").read_text()
    assert report.terminal_lines(found)


def test_a_study_whose_only_run_failed_says_that_first(tmp_path):
    plan, layout = make_plan(arms=("bf16",), seeds=(0,), steps=1), Layout(tmp_path)
    (tmp_path / "plan.json").write_text(to_json(plan))
    write_run(layout, plan, "bf16", 0, done=False)
    layout.run("bf16", 0).mark_failed({"attempt": 1, "seconds": 9.0, "cause": ["it broke"]})
    found, page = look(tmp_path)
    assert html.headline(found) == "1 of 1 run failed. Nothing can be tested yet: no run has finished."
    assert report.terminal_lines(found)[-1] == html.headline(found)
    assert '<section class="verdict broken"><h2>1 of 1 run failed.' in page
    assert "There are no figures." in page and "of the other runs" not in page
    assert "1 arm &middot; 1 seed &middot; 1 step of 16 prompts, 8 responses each" in page


def test_failed_runs_come_before_verdicts(tmp_path):
    layout = write_study(tmp_path)
    run = layout.run("fp8", 1)
    (run.folder / "done.json").unlink()
    run.mark_failed({"attempt": 1, "seconds": 9.0, "cause": ["it broke"]})
    found, page = look(tmp_path)
    assert html.headline(found).startswith("1 of 21 runs failed. ") and "of the 15 claims are" in html.headline(found)
    assert html.tone(found) == "verdict broken" and "The figures are of the other runs." in page


def test_what_keeps_claims_from_being_tested(tmp_path):
    write_study(tmp_path / "one", make_plan(arms=("bf16", "quads"), seeds=(0,)))
    found, _ = look(tmp_path / "one")
    lacking = [o for o in found["claims"] if any("no figure of" in part["text"] for part in o["parts"])]
    assert 0 < len(lacking) < 15 and html.tone(found) == "verdict idle"
    said = html.headline(found)
    assert said.startswith("Nothing can be tested yet: ") and said.endswith(" The figures stand as they are.")
    assert "claims lack figures of fp8, naive, qat, symmetric, quads_full, " in said and "a second seed" in said
    write_study(tmp_path / "seeds", make_plan(seeds=(0,)))
    said = html.headline(look(tmp_path / "seeds")[0])
    assert "can't be tested (14 claims need a second seed)" in said and "lack" not in said
    write_study(tmp_path / "arms", make_plan(arms=("bf16", "naive")))
    said = html.headline(look(tmp_path / "arms")[0])
    assert "lack figures of fp8, qat, symmetric, quads, quads_full)" in said and "seed" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 2}, "was not measured: a probe runs every 5 steps, and a run has 2."),
        ({"steps": 2, "probe_every": 0}, "was not measured: the probe was off (quads.probe.every=0)."),
        ({"steps": 4, "overrides": ("quads.probe.every=9",)}, "a probe runs every 9 steps, and a run has 4."),
    ],
)
def test_a_study_too_short_for_a_probe_says_so(tmp_path, changes, said):
    write_study(tmp_path, make_plan(arms=("bf16", "quads"), seeds=(0,), **changes))
    _, page = look(tmp_path)
    assert said in page and "measured every few steps" not in page


def test_panels_without_comparisons_are_left_out(tmp_path, finished):
    folder, whole = finished
    assert [axes.get_title(loc="left") for axes in plots.claims(whole).axes] == [
        "mismatch: factor",
        "reward: difference",
    ]
    assert "Claimed: factors above 1; differences below 0" in (folder / "report" / "study.html").read_text()
    write_study(tmp_path, make_plan(arms=("bf16", "quads"), seeds=(0,)))
    found, page = look(tmp_path)
    assert [axes.get_title(loc="left") for axes in plots.claims(found).axes] == ["reward: difference"]
    assert "Claimed: differences below 0" in page and "factors" not in page.split("Claimed")[1][:80]


def test_runs_from_different_sources_are_pointed_out(tmp_path):
    plan = make_plan(arms=("bf16",), seeds=(0, 1))
    layout = write_study(tmp_path, plan)
    run = layout.run("bf16", 1)
    run.mark_done(run.done() | {"code": "beef"})
    found, _ = look(tmp_path)
    assert ("mixed sources", "the runs were made with 2 states of the sources: beef, c0de.") in html.findings(found)


def test_an_arms_ratio_that_was_overridden_is_found_in_its_evaluation(tmp_path):
    plan = make_plan(arms=("bf16", "quads"), seeds=(0,))
    layout = write_study(tmp_path, plan)
    for name in ("quads-seed0-own", "start-w4a4-0.25"):
        write_evaluation(layout, plan, name, "w4a4", 0.25, 0.5)
    found = results.load(tmp_path)
    assert found.engines == {"bf16": "bf16", "quads": "w4a4-0.25"}


# --- files


def test_tables_hold_every_step_run_and_comparison(finished):
    folder, found = finished

    def rows(name):
        with (folder / "report" / f"{name}.csv").open() as file:
            return list(csv.DictReader(file))

    assert len(rows("steps")) == 21 * 24 and len(rows("runs")) == 21 and len(rows("arms")) == 7
    assert float(rows("arms")[2]["d_mean"]) == pytest.approx(arm(found, "naive")["d_mean"]["mean"])
    evaluations = rows("evaluations")
    assert len(evaluations) == 5 + 3 + 18 * 2 and sum(row["weights"] == "start" for row in evaluations) == 5
    parts = [row for row in rows("claims") if row["claim"] == "ordering"]
    assert len(parts) == 4 and all(float(row["p"]) < 0.05 and row["kind"] == "paired" for row in parts)
    assert {row["n"] for row in parts} == {"3"}


def test_the_page_needs_nothing_else_and_names_no_folder(finished):
    folder, _ = finished
    page = (folder / "report" / "study.html").read_text()
    inner = re.sub(r"""(xlink:)?href="#|url\(#""", "", page)
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", inner)
    assert page.count("<svg") == len(list((folder / "report").glob("*.png"))) == 7
    for file in (folder / "report").iterdir():
        if file.suffix in (".html", ".json", ".csv"):
            assert str(folder) not in file.read_text()


def test_report_can_be_written_again(finished, capsys):
    folder, _ = finished
    (folder / "about.json").write_text(json.dumps(about()))
    before = (folder / "report" / "results.json").read_text()
    assert cli.main(["--report", "--out", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (folder / "report" / "results.json").read_text() == before
    assert "The mismatch is ordered" in out and "study.html" in out


def test_studies_side_by_side(finished, tmp_path, capsys):
    folder, _ = finished
    world = WORLD | {"naive": (0.3, 0.40, -0.35, (0.1, 0.2, 0.01))}
    hard = tmp_path / "hard"
    write_study(hard, make_plan(stress=("lr1e-3",), arms=("bf16", "naive", "quads")), world)
    (hard / "report").mkdir()
    (hard / "report" / "results.json").write_text(json.dumps(report._finite(look(hard)[0])))
    assert cli.main(["--compare", str(folder), str(hard), "--out", str(tmp_path / "c")]) == 0
    with (tmp_path / "c" / "compare.csv").open() as file:
        rows = {(row["stress"], row["arm"]): row for row in csv.DictReader(file)}
    assert len(rows) == 10 and rows["lr1e-3", "quads"]["study"] == "hard"
    assert float(rows["none", "naive"]["collapsed"]) == 0 and float(rows["lr1e-3", "naive"]["collapsed"]) == 1
    assert float(rows["lr1e-3", "quads"]["collapsed"]) == 0
    assert float(rows["lr1e-3", "naive"]["reward_last_gap"]) < -0.3 < float(rows["none", "naive"]["reward_last_gap"])
    assert rows["none", "bf16"]["own_gap"] == "0.0"
    assert "lr1e-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b'{"plan": ', "no JSON"),
        (b"[]", "no JSON object but []"),
        (b"\xff\xfe", "no JSON"),
        (b"{}", "has no plan, about, arms"),
        (b'{"plan": {"steps": 1}, "about": {"outliers": null}, "arms": []}', "plan has no policy, stress"),
    ],
)
def test_broken_results_are_named(tmp_path, capsys, content, said):
    file = Layout(tmp_path).report / "results.json"
    file.parent.mkdir()
    file.write_bytes(content)
    assert cli.main(["--compare", str(tmp_path), "--out", str(tmp_path / "c")]) == cli.WRONG
    err = capsys.readouterr().err
    assert f"{file}: is broken" in err and said in err and "--report --out" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "c").exists()


# --- drawings


def test_labels_at_the_ends_of_lines_do_not_meet():
    places = plots.spread_apart({"a": 0.50, "b": 0.51, "c": 0.1, "d": 0.505}, 0.05)
    assert list(sorted(places, key=places.get)) == ["c", "a", "d", "b"]
    values = sorted(places.values())
    assert all(high - low >= 0.0499 for low, high in zip(values, values[1:], strict=False))
    assert plots.spread_apart({"a": 0.2, "b": 0.8}, 0.05) == {"a": 0.2, "b": 0.8}


@needs_browser
@pytest.mark.integration
@pytest.mark.parametrize(("scheme", "paper"), SCHEMES)
def test_the_page_in_a_browser(finished, tmp_path, scheme, paper):
    folder, _ = finished
    image = screenshot(tmp_path, folder / "report" / "study.html", scheme, (1200, 5000))
    assert image.getpixel((4, 4)) == paper
    colors = {color: count for count, color in image.getcolors(1 << 24)}
    for name, color in ARM_COLORS.items():
        mark = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert colors.get(mark, 0) > 50, name


@needs_browser
@pytest.mark.integration
def test_nothing_is_wider_than_the_window(finished, tmp_path):
    folder, _ = finished
    script = "document.body.dataset.seen = document.documentElement.scrollWidth + ' ' + innerWidth"
    dom = dump_with(tmp_path, folder / "report" / "study.html", script, 1200)
    scroll, inner = map(int, re.search(r'data-seen="(\d+) (\d+)"', dom).groups())
    assert scroll <= inner == 1200
