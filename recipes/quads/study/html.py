"""The page of `quads study`: one HTML file with everything in it, from the contents of results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from quads_recipe.diagnose_html import _figure, _number, _table
from quads_recipe.diagnose_style import CSS
from quads_recipe.study import claims
from quads_recipe.study.collect import METRICS
from quads_recipe.study.presets import ALL_ARMS
from quads_recipe.words import plural

EXTRA_CSS = """
.shown { --tone: var(--good); } .contradicted { --tone: var(--bad); } .open { --tone: var(--warm); }
.untestable { --tone: var(--soft); } .failed { --tone: var(--bad); }
.claims td { vertical-align: top; white-space: normal; text-align: left; padding-top: 9px; padding-bottom: 9px; }
.claims td:first-child { width: 37%; font-weight: 600; }
.claims td:nth-child(2) { white-space: nowrap; width: 1%; }
.claims .paper { color: var(--soft); font-weight: 400; font-size: 12.5px; display: block; margin-top: 2px; }
.claims .part { display: block; padding-left: 15px; text-indent: -15px; margin-bottom: 3px; font-size: 13px; }
.dot { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 7px; background: var(--tone); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
figure svg { max-width: 1000px; }
.verdict.broken { border-left-color: var(--bad); } .verdict.idle { border-left-color: var(--soft); }
"""
_TONES = {
    claims.SHOWN: "shown",
    claims.CONTRADICTED: "contradicted",
    claims.NOT_SHOWN: "open",
    claims.NOT_TESTABLE: "untestable",
}


def page(results: dict, drawings: Mapping[str, str]) -> str:
    """The whole document. drawings: name -> an <svg> element."""
    body = [
        _header(results),
        _summary(results),
        _claims(results, drawings),
        _mismatch(results, drawings),
        _reward(results, drawings),
        _health(results, drawings),
        _time(results, drawings),
        _runs(results),
        _footer(results),
    ]
    title = escape(results["about"]["title"])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{CSS}{EXTRA_CSS}</style></head>\n<body><main>\n{''.join(body)}</main></body></html>\n"
    )


# -- sections


def _header(results: dict) -> str:
    about, plan = results["about"], results["plan"]
    facts = [
        plural(len(plan["arms"]), "arm"),
        plural(len(plan["seeds"]), "seed"),
        f"{plural(plan['steps'], 'step')} of {plural(about['prompts_per_step'], 'prompt')}, "
        f"{plural(about['responses'], 'response')} each",
        f"policy {escape(plan['policy'])}",
        *([f"stress {escape(', '.join(plan['stress']))}"] if plan["stress"] else []),
        escape(about["machine"].get("gpus") or f"{about['machine']['processor']}, {about['machine']['cores']} cores"),
        escape(about["date"]),
    ]
    return f'<h1>{escape(about["title"])}</h1><div class="about">{" &middot; ".join(facts)}</div>'


def _summary(results: dict) -> str:
    tiles = "".join(f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in tiles_of(results))
    lines = "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in findings(results))
    return (
        f'<section class="{tone(results)}"><h2>{escape(headline(results))}</h2><div class="tiles">{tiles}</div>'
        f"<dl>{lines}</dl></section>"
    )


def tone(results: dict) -> str:
    """Classes of the summary's frame: bad when a run failed, a warning when a claim is contradicted."""
    statuses = {outcome["status"] for outcome in results["claims"]}
    if any(run["status"] == "failed" for run in results["runs"]):
        return "verdict broken"
    if claims.CONTRADICTED in statuses:
        return "verdict missed"
    return "verdict" if statuses - {claims.NOT_TESTABLE} else "verdict idle"


def headline(results: dict) -> str:
    """Failed runs, if there are any, and how many claims were shown, in a sentence or two."""
    failed = sum(run["status"] == "failed" for run in results["runs"])
    start = f"{failed} of {plural(len(results['runs']), 'run')} failed. " if failed else ""
    return start + (_verdicts(results) if _testable(results) else _nothing_testable(results))


def _testable(results: dict) -> bool:
    return any(outcome["status"] != claims.NOT_TESTABLE for outcome in results["claims"])


def _nothing_testable(results: dict) -> str:
    start = "Nothing can be tested yet: "
    if not any(run["status"] == "done" for run in results["runs"]):
        return f"{start}no run has finished."
    return f"{start}{_lacking(results)}. The figures stand as they are."


def _lacking(results: dict) -> str:
    """What keeps claims from being tested, and how many: arms without figures, a second seed."""
    lacks = [{name for part in o["parts"] for name in part["lacks"]} for o in results["claims"]]
    seeds = sum(claims.SECOND_SEED in names for names in lacks)
    without_arms = [names - {claims.SECOND_SEED} for names in lacks if names - {claims.SECOND_SEED}]
    found = []
    if without_arms:
        arms = [arm for arm in ALL_ARMS if any(arm in names for names in without_arms)]
        verb = "lacks" if len(without_arms) == 1 else "lack"
        found.append(f"{plural(len(without_arms), 'claim')} {verb} figures of {', '.join(arms)}")
    if seeds:
        found.append(f"{plural(seeds, 'claim')} {'needs' if seeds == 1 else 'need'} a second seed")
    return ", ".join(found) or "figures are not above 0"


def _verdicts(results: dict) -> str:
    found = [outcome["status"] for outcome in results["claims"]]
    count = found.count(claims.SHOWN)
    parts = [f"{count} of the {len(found)} claims {'is' if count == 1 else 'are'} shown here"]
    if count := found.count(claims.CONTRADICTED):
        parts.append(f"{count} {'is' if count == 1 else 'are'} contradicted")
    if count := found.count(claims.NOT_SHOWN):
        parts.append(f"{count} {'is' if count == 1 else 'are'} not shown")
    if count := found.count(claims.NOT_TESTABLE):
        parts.append(f"{count} can't be tested ({_lacking(results)})")
    return ", ".join(parts)


def tiles_of(results: dict) -> list[tuple[str, str]]:
    """(figure, what it is) of the four most asked for, where they are known."""
    tiles = []
    naive = figure(results, "naive", "d_mean")
    arm = next((a for a in ("quads_full", "quads") if figure(results, a, "d_mean")), None)
    if naive and arm:
        factor = naive["mean"] / figure(results, arm, "d_mean")["mean"]
        tiles.append((f"{factor:.1f}x", f"smaller mean |d| with {arm} than with naive"))
    if arm and (base := figure(results, "bf16", "d_mean")):
        times = figure(results, arm, "d_mean")["mean"] / base["mean"]
        tiles.append((f"{times:.1f}x", f"mean |d| of {arm} against the floor, BF16's"))
    for name, text in (("naive", "naive"), (arm, arm)):
        own, base = figure(results, name, "own"), figure(results, "bf16", "own")
        if own and base:
            tiles.append((f"{own['mean'] - base['mean']:+.3f}", f"held-out pass@1 after training: {text} minus bf16"))
    return [(escape(value), escape(text)) for value, text in tiles[:4]]


def findings(results: dict) -> list[tuple[str, str]]:
    """(title, sentence with numbers): the gap before training, apart from that in learning; failures."""
    found = []
    if row := next((r for r in results["start"] if r["arm"] == "naive" and r["gap"]), None):
        text = f"{row['gap']['effect']:+.3f} \u00b1 {row['gap']['error']:.3f} pass@1 (error over held-out problems)"
        found.append(
            ("naive before training", f"{text}: the engine's loss on the starting policy, nothing learned yet.")
        )
    own, plain = ({name: figure(results, name, side) for name in ("naive", "bf16")} for side in ("own", "in_bf16"))
    if own["naive"] and own["bf16"] and plain["naive"] and plain["bf16"]:
        text = (
            f"{own['naive']['mean'] - own['bf16']['mean']:+.3f} in its own engine; "
            f"{plain['naive']['mean'] - plain['bf16']['mean']:+.3f} with both in BF16, which is the gap in learning."
        )
        found.append(("naive after training", text))
    broken = [run for run in results["runs"] if run["status"] != "done"]
    if broken:
        names = ", ".join(f"{run['arm']} seed {run['seed']} ({run['status']})" for run in broken)
        rest = "The figures are of the other runs." if len(broken) < len(results["runs"]) else "There are no figures."
        found.append(("not finished", f"{names}. {rest}"))
    found += [("note", note) for note in results["notes"]]
    codes = {run["code"] for run in results["runs"] if run["code"]}
    if len(codes) > 1:
        found.append(
            (
                "mixed sources",
                f"the runs were made with {len(codes)} states of the sources: {', '.join(sorted(codes))}.",
            )
        )
    return found


def _claims(results: dict, drawings: Mapping[str, str]) -> str:
    rows = []
    for outcome in results["claims"]:
        badge = f'<span class="badge {_TONES[outcome["status"]]}">{outcome["status"]}</span>'
        parts = "".join(
            f'<span class="part"><span class="dot {_TONES[part["status"]]}"></span>{escape(part["text"])}</span>'
            for part in outcome["parts"]
        )
        claim = f'{escape(outcome["claim"])}<span class="paper">Paper: {escape(outcome["paper"])}</span>'
        rows.append(f"<tr><td>{claim}</td><td>{badge}</td><td>{parts}</td></tr>")
    head = "".join(f'<th class="left">{title}</th>' for title in ("claim", "here", "by these numbers"))
    return (
        "<h2>The paper's claims</h2><p>Arms are compared seed by seed, since the runs of a seed share prompts and "
        f"starting policy. Shown: the claimed sign with p below {claims.LEVEL:g}, two-sided, in every comparison; "
        f"contradicted: the opposite sign. Equal means a difference below {claims.MARGIN:g} by two one-sided tests. "
        "With one seed nothing can be tested. Nothing is corrected for the number of claims.</p>"
        f"{_figure(drawings, 'claims', 'Every comparison with its 95% interval')}"
        f"{_claimed(results)}"
        f'<div class="scroll"><table class="claims"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _claimed(results: dict) -> str:
    """How to read the drawing of the comparisons, which has a panel for each scale that occurs."""
    scales = {part["scale"] for outcome in results["claims"] for part in outcome["parts"]}
    said = {"factor": "factors above 1", "difference": "differences below 0 (dots) or within the band (squares)"}
    panels = "; ".join(text for scale, text in said.items() if scale in scales)
    return f'<p class="soft">Claimed: {panels}. Lines are 95% intervals.</p>' if panels else ""


def _mismatch(results: dict, drawings: Mapping[str, str]) -> str:
    names = ("d_mean", "d_p99", "d_max", "d_max_ever", "k3", "covered")
    labels = {"d_max_ever": "largest |d| of all steps"}
    return (
        "<h2>Mismatch</h2><p>d is the logprob that the rollout reported for a token it sampled, minus the actor's, "
        "over every response token of every step. Bands and &plusmn; are one standard error over seeds; small dots "
        "are seeds.</p>"
        f"{_figure(drawings, 'mismatch', 'Mean mismatch over the steps and per arm')}"
        f"{_figures_table(results, names, labels)}"
        f"{_parts(results, drawings)}"
    )


def _parts(results: dict, drawings: Mapping[str, str]) -> str:
    split = "d = d_weight + d_act + d_num"
    if not any("part_act" in arm["figures"] for arm in results["arms"]):
        return f"<p>{split} was not measured: {escape(_no_probe(results['plan']))}.</p>"
    return (
        f"<p>{split}, measured every few steps on some of the rollouts: the rounding of weights, "
        "that of activations, and the engine's arithmetic against the trainer's.</p>"
        f"{_figure(drawings, 'parts', 'Parts of the mismatch per arm')}"
    )


def _no_probe(plan: Mapping) -> str:
    """Why no finished run has a probe's figures."""
    given = dict(one.lstrip("+").split("=", 1) for one in plan["overrides"])
    every = str(given.get("quads.probe.every", plan["probe_every"]))
    if every == "0":
        return "the probe was off (quads.probe.every=0)"
    if every.isdecimal() and plan["steps"] < int(every):
        return f"a probe runs every {plural(int(every), 'step')}, and a run has {plan['steps']}"
    return "no run with a probe has finished"


def _reward(results: dict, drawings: Mapping[str, str]) -> str:
    return (
        "<h2>Reward</h2><p>The reward of a step is measured in the arm's own engine, so it holds the engine's loss of "
        "accuracy as well as what was learned. The two are apart below: pass@1 on held-out problems, before and after "
        "training, in the arm's own engine and in BF16.</p>"
        f"{_figure(drawings, 'reward', 'Reward over the steps and its gap to bf16')}"
        f"{_figure(drawings, 'heldout', 'Held-out pass@1 before and after training')}"
        f"{_heldout_table(results)}"
    )


def _heldout_table(results: dict) -> str:
    head = ["arm", "before, own engine", "gap to BF16 before", "after, own engine", "gap to bf16 after"]
    head += ["after, in BF16", "gap to bf16 in learning", "engine's loss after"]
    starts = {row["arm"]: row for row in results["start"]}
    base = {name: figure(results, "bf16", name) for name in ("own", "in_bf16")}
    rows = []
    for arm in results["arms"]:
        found, start = arm["figures"], starts[arm["arm"]]
        own, plain = found.get("own"), found.get("in_bf16")
        gap = start["gap"]
        cells = [_arm_name(arm["arm"]), _plus_minus(start["own"])]
        cells.append("-" if gap is None else _signed(gap["effect"], gap["error"]))
        cells += [_plus_minus(own), _difference(own, base["own"])]
        cells += [_plus_minus(plain), _difference(plain, base["in_bf16"]), _difference(own, plain)]
        rows.append((False, cells))
    return _table(head, rows)


def _health(results: dict, drawings: Mapping[str, str]) -> str:
    names = ("entropy", "grad_norm", "clipped", "length", "cut", "changed", "moved", "receipts")
    return (
        "<h2>Training</h2><p>What a collapse shows up in first: entropy, gradient norm and response length.</p>"
        f"{_figure(drawings, 'health', 'Entropy, gradient norm, length and more over the steps')}"
        f"{_figures_table(results, names, {})}"
    )


def _time(results: dict, drawings: Mapping[str, str]) -> str:
    where = "" if results["about"]["machine"].get("gpus") else (
        " On a CPU NVFP4 is emulated, so these say what the study costs and nothing about speed on a GPU."
    )  # fmt: skip
    drawing = _figure(drawings, "time", "Seconds of a step")
    return f"<h2>Time</h2><p>Medians over the steps, without the first.{where}</p>{drawing}"


def _runs(results: dict) -> str:
    head = ["run", "state", "steps", "seconds", "of them start-up", "attempt", "reward, first third", "last third"]
    head += ["mean |d|", "pass@1 own", "in BF16", "collapsed"]
    rows = []
    for run in results["runs"]:
        tone = {"done": "shown", "failed": "failed"}.get(run["status"], "untestable")
        f = run["figures"]
        cells = [f"{_arm_name(run['arm'])} seed {run['seed']}", f'<span class="badge {tone}">{run["status"]}</span>']
        cells += [_plain(run[name]) for name in ("steps", "seconds", "start_seconds", "attempt")]
        cells += [_value(f.get(name)) for name in ("reward_first", "reward_last", "d_mean")]
        cells += [_value(run["own"]), _value(run["in_bf16"])]
        cells.append("-" if "collapsed" not in f else "yes" if f["collapsed"] else "no")
        rows.append((False, cells))
    causes = "".join(
        f"<details open><summary>{escape(run['arm'])} seed {run['seed']} failed</summary>"
        f"<p><code>{'<br>'.join(escape(line) for line in run['cause'])}</code></p></details>"
        for run in results["runs"]
        if run["cause"]
    )
    return f"<h2>The runs</h2>{_table(head, rows)}{causes}"


def _footer(results: dict) -> str:
    about, plan = results["about"], results["plan"]
    versions = ", ".join(f"{name} {escape(version)}" for name, version in plan["versions"].items())
    machine = ", ".join(f"{name} {escape(value)}" for name, value in about["machine"].items())
    overrides = "<br>".join(escape(one) for one in plan["overrides"]) or "none"
    outliers = ", ".join(f"{name} {value:g}" for name, value in (about["outliers"] or {}).items())
    made = f" (outliers: {escape(outliers)})" if outliers else ""
    return (
        f"<footer><p>Starting policy {escape(plan['policy'])}{made}, weights {plan['policy_digest'][:12]}. Evaluation: "
        f"{plural(plan['heldout'], 'held-out problem')}, {plural(plan['samples'], 'response')} each at temperature 1, "
        "the same random seeds in every engine. Collapsed: the last third of the steps below half of the best third."
        f"</p><p>Overrides: <code>{overrides}</code></p><p><code>{escape(about['command'])}</code></p><p>{machine}</p>"
        f"<p>{versions} &middot; {about['seconds'] / 60:.0f} min in runs. "
        "How to read it, and how the settings were chosen: docs/study.md.</p></footer>"
    )


# -- parts


def figure(results: dict, arm: str | None, name: str) -> dict | None:
    """mean, error and n of a figure of an arm; None where there is none."""
    found = next((a for a in results["arms"] if a["arm"] == arm), None)
    return found["figures"].get(name) if found else None


def _figures_table(results: dict, names: Sequence[str], labels: Mapping[str, str]) -> str:
    known = [name for name in names if any(name in arm["figures"] for arm in results["arms"])]
    head = ["arm"]
    for name in known:
        unit = f", {METRICS[name].unit}" if name in METRICS and METRICS[name].unit not in ("", "nats") else ""
        head.append(f"{labels.get(name) or METRICS[name].label}{unit}")
    rows = [
        (False, [_arm_name(arm["arm"]), *(_plus_minus(arm["figures"].get(name)) for name in known)])
        for arm in results["arms"]
    ]
    return _table(head, rows)


def _arm_name(arm: str) -> str:
    from quads_recipe.diagnose_plots import ARM_COLORS

    return f'<span class="swatch" style="background:{ARM_COLORS.get(arm, "#888")}"></span>{escape(arm)}'


def _plus_minus(spread: Mapping | None) -> str:
    if spread is None:
        return "-"
    error = f' <span class="soft">&plusmn; {spread["error"]:.1g}</span>' if spread["error"] else ""
    return f"{_number(spread['mean'])}{error}"


def _signed(value: float, error: float | None) -> str:
    spread = f' <span class="soft">&plusmn; {error:.1g}</span>' if error else ""
    return f"{value:+.3f}{spread}"


def _difference(a: Mapping | None, b: Mapping | None) -> str:
    return "-" if a is None or b is None or a is b else f"{a['mean'] - b['mean']:+.3f}"


def _value(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
