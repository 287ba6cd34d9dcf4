"""The page of `quads diagnose`: one HTML file with everything in it, from the contents of diagnose.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from quads_recipe.analysis.evidence import has_percentiles
from quads_recipe.analysis.tokens import CAUSES
from quads_recipe.diagnose_plots import shown_ratios
from quads_recipe.diagnose_style import CSS
from quads_recipe.words import plural

_LAYERS_SHOWN = 64


def page(results: dict, drawings: Mapping[str, str]) -> str:
    """The whole document. drawings: name -> an <svg> element."""
    about = results["about"]
    body = [
        _header(about),
        _verdict(results),
        _arms(results, drawings),
        _origin(results, drawings),
        _ratios(results, drawings),
        _layers(results),
        _left_out(results, drawings),
        _tokens(results, drawings),
        _footer(about),
    ]
    title = f"QUADS diagnose: {escape(str(about['model']))}"
    sections = "".join(part for part in body if part)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{CSS}</style></head>\n<body><main>\n{sections}</main></body></html>\n"
    )


# -- sections


def _header(about: dict) -> str:
    facts = [
        f"{plural(about['prompts'], 'prompt')} of {escape(str(about['data']))}",
        f"responses up to {plural(about['max_new'], 'token')}",
        f"compute dtype {about['dtype']}",
        escape(str(about["device"])),
        escape(str(about["date"])),
    ]
    return (
        f"<h1>Rollout against actor: {escape(str(about['model']))}</h1>"
        f'<div class="about">{" &middot; ".join(facts)}</div>'
    )


def _verdict(results: dict) -> str:
    verdict = results["verdict"]
    findings = "".join(f"<dt>{escape(f['title'])}</dt><dd>{escape(f['text'])}</dd>" for f in verdict["findings"])
    cautions = "".join(f'<p class="caution">{escape(text)}</p>' for text in verdict["cautions"])
    kind = "verdict" if verdict["meets_target"] and not cautions else "verdict missed"
    return (
        f'<section class="{kind}">{cautions}<h2>{escape(verdict["headline"])}</h2>{_tiles(results)}'
        f"<dl>{findings}</dl></section>"
    )


def _tiles(results: dict) -> str:
    chosen = _chosen(results)
    if chosen is None:
        return ""
    d, cost = chosen.get("own", chosen["parts"]["d"]), results["verdict"]["cost"]
    tiles = [(f"{d['mean']:.2g}", f"mean |d| in nats, {escape(_recommended(results))}")]
    naive = _by_arm(results, "naive")
    if naive and d["mean"]:
        tiles.append((f"{naive['parts']['d']['mean'] / d['mean']:.1f}x", "smaller than with naive NVFP4"))
    tiles.append((f"{cost['products']:.0%}", "of BF16's time for matrix products, counted at peak rates"))
    tiles.append((f"{cost['weights']:.0%}", "of BF16's weight bytes, which bound decoding"))
    inner = "".join(f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in tiles)
    return f'<div class="tiles">{inner}</div>'


def _arms(results: dict, drawings: Mapping[str, str]) -> str:
    head = ["arm", "actor", "rollout", "ratio", "mean |d|", "p99", "max"]
    head += ["mean exp|d|", "KL (k3)", "GEMM time", "weights"]
    rows = []
    for arm in results["arms"]:
        d = arm["parts"]["d"]
        rows.append(
            (
                _is_chosen(arm, results),
                [
                    escape(arm["arm"]), arm["actor"], arm["rollout"], f"{arm['ratio']:g}" if arm["ratio"] else "-",
                    _plus_minus(d), _p99(arm), _number(d["max"]), f"{arm['mean_exp_abs']:.4f}",
                    _number(arm["k3"]), f"{arm['cost']['products']:.0%}", f"{arm['cost']['weights']:.0%}",
                ],
            )
        )  # fmt: skip
    return (
        "<h2>The arms</h2><p>d is the logprob that the rollout reported for a token it sampled, minus the actor's. "
        "Each arm is measured on the tokens of its own rollout; arms with the same rollout share them.</p>"
        f"{_figure(drawings, 'arms', 'Mismatch per arm')}{_table(head, rows)}"
        f"{_figure(drawings, 'distribution', 'Share of tokens with a larger mismatch')}"
    )


def _origin(results: dict, drawings: Mapping[str, str]) -> str:
    head = ["arm", "mean |d|", "mean |d_weight|", "mean |d_act|", "mean |d_num|", "engine agrees", "largest |d - sum|"]
    rows = []
    for arm in results["arms"]:
        parts = arm["parts"]
        cells = [escape(arm["arm"]), *(_plus_minus(parts[name]) for name in ("d", "weight", "act", "num"))]
        rows.append((_is_chosen(arm, results), [*cells, f"{arm['engine_agrees']:.0%}", _number(arm["sum_error"])]))
    return (
        "<h2>Where d comes from</h2><p>d = d_weight + d_act + d_num, token by token. d_weight: the trainer's forward "
        "with the rollout's weights, against its own. d_act: with the rollout's rounding of activations on top, "
        "residual compensation included. d_num: what is left, the engine's kernels against the trainer's. Engine "
        "agrees: tokens whose d_num is within FP32's noise, 1e-5.</p>"
        f"{_figure(drawings, 'shares', 'Shares of the variance of d')}{_table(head, rows)}"
    )


def _ratios(results: dict, drawings: Mapping[str, str]) -> str:
    if not results["ratios"]:
        return ""
    base = results["ratios"][0]["parts"]["act"]["mean"]
    head = ["ratio", "mean |d|, own tokens", "mean |d|, same tokens", "p99", "max", "mean |d_act|", "change of |d_act|"]
    head += ["GEMM time", "of it residual"]
    rows = []
    for arm in results["ratios"]:
        d, act, cost = arm["parts"]["d"], arm["parts"]["act"], arm["cost"]
        change = f"{act['mean'] / base - 1:+.0%}" if base else "-"
        rows.append(
            (
                arm["ratio"] == results["verdict"]["ratio"],
                [
                    f"{arm['ratio']:g}", _plus_minus(arm["own"]), _plus_minus(d), _p99(arm), _number(d["max"]),
                    _plus_minus(act), change, f"{cost['products']:.0%}", f"{cost['residual'] / cost['products']:.0%}",
                ],
            )
        )  # fmt: skip
    return (
        "<h2>Residual compensation</h2><p>The same responses (of the largest ratio), scored by the rollout at each "
        "ratio, so that ratios do not differ by the luck of sampling. On its own tokens, as in training, a rollout "
        "differs more: it prefers tokens that it overrates. The verdict goes by those. The actor has fake-quantized "
        "weights (arms qat, quads, quads_full).</p>"
        f"{_figure(drawings, 'ratios', 'Mismatch by residual ratio')}{_table(head, rows)}"
    )


def _layers(results: dict) -> str:
    if not results["sites"]:
        return ""
    shown = shown_ratios(results)
    return (
        "<h2>Layer by layer</h2><p>Relative error of each quantized product on the inputs it really gets: what a layer "
        "adds, not what it inherits. Energy covered is the share of the residual's energy that the mask selects.</p>"
        f"{_kinds(results, shown)}{_heat(results, shown)}"
    )


def _kinds(results: dict, shown: Sequence[str]) -> str:
    head = ["kind", "layers", "of all GEMM FLOPs", "error of weights", "error in FP8, both"]
    head += [f"error of activations, ratio {ratio}" for ratio in shown]
    head += [f"energy covered, ratio {ratio}" for ratio in shown[1:-1]]
    rows = []
    for kind in results["kinds"]:
        cells = [escape(kind["kind"]), str(kind["sites"]), f"{kind['flops']:.0%}"]
        cells += [f"{kind['weight_error']:.2%}", f"{kind['fp8_error']:.2%}"]
        cells += [f"{kind['ratios'][ratio]['error']:.2%}" for ratio in shown]
        cells += [f"{kind['ratios'][ratio]['covered']:.0%}" for ratio in shown[1:-1]]
        rows.append((False, cells))
    return _table(head, rows)


def _heat(results: dict, shown: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(site["kind"] for site in results["sites"]))
    numbers = sorted({site["layer"] for site in results["sites"] if site["layer"] is not None})
    errors = {(site["layer"], site["kind"]): site["ratios"] for site in results["sites"]}
    top = max((site["ratios"][shown[0]]["error"] for site in results["sites"]), default=0) or 1
    groups = "".join(
        f'<th colspan="{len(kinds)}">{"no compensation" if ratio == "0" else f"ratio {ratio}"}</th>' for ratio in shown
    )
    names = "".join(f"<th>{escape(kind).replace(' ', '<br>', 1)}</th>" for _ in shown for kind in kinds)
    body = []
    for number in numbers[:_LAYERS_SHOWN]:
        cells = []
        for ratio in shown:
            for kind in kinds:
                found = errors.get((number, kind))
                cells.append(_heat_cell(found[ratio]["error"] if found else None, top))
        body.append(f"<tr><td>{number}</td>{''.join(cells)}</tr>")
    more = len(numbers) - _LAYERS_SHOWN
    note = f'<p class="soft">{more} more in layers.csv.</p>' if more > 0 else ""
    return (
        f'<div class="scroll"><table class="heat"><thead><tr><th>layer</th>{groups}</tr>'
        f"<tr><th></th>{names}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}"
    )


def _heat_cell(error: float | None, top: float) -> str:
    if error is None:
        return '<td class="cell soft">-</td>'
    strength = round(62 * min(1.0, error / top))
    style = f"background: color-mix(in srgb, var(--warm) {strength}%, transparent)"
    return f'<td class="cell" style="{style}">{error:.1%}</td>'


def _left_out(results: dict, drawings: Mapping[str, str]) -> str:
    if not results["left_out"]:
        return ""
    chosen = results["verdict"]["leave_out"]
    advice = f"The verdict: <code>quads.exclude=[{escape(','.join(chosen))}]</code>" if chosen else ""
    return (
        "<h2>Leaving layers out</h2><p>How much of mean |d_act| disappears when one layer's activations alone stay "
        f"unquantized, at the recommended ratio. Its weights stay in NVFP4 here. {advice}</p>"
        f"{_figure(drawings, 'left_out', 'Share of the mismatch by layer left out')}"
    )


def _tokens(results: dict, drawings: Mapping[str, str]) -> str:
    if not results["tokens"]:
        return ""
    arms = list(dict.fromkeys(token["arm"] for token in results["tokens"]))
    first = results["verdict"]["arm"] if results["verdict"]["arm"] in arms else arms[0]
    blocks = []
    for arm in sorted(arms, key=lambda name: name != first):
        found = [token for token in results["tokens"] if token["arm"] == arm]
        opened = " open" if arm == first else ""
        blocks.append(f"<details{opened}><summary>{escape(arm)}</summary>{_token_table(found)}</details>")
    return (
        "<h2>The worst tokens</h2><p>A cause is given by rule: the engine, if |d_num| is larger than the rest; another "
        "expert, if experts changed and using the actor's experts (replayed: what d_weight + d_act then is) halves the "
        "difference; else the larger part.</p>"
        f"{_figure(drawings, 'causes', 'Mismatch by cause')}{''.join(blocks)}"
    )


def _token_table(tokens: Iterable[dict]) -> str:
    head = ["context and token", "rollout", "actor", "d", "d_weight", "d_act", "d_num"]
    head += ["expert changed", "replayed", "cause"]
    rows = []
    for t in tokens:
        text = f'<span class="context">{escape(t["context"])}</span><span class="token">{escape(t["token"])}</span>'
        earlier = f"{t['flips_before']} earlier" if t["flips_before"] else "-"
        flips = f"layer {', '.join(map(str, t['flipped_layers']))}" if t["flipped_layers"] else earlier
        badge = f'<span class="badge {t["cause"]}" title="{escape(CAUSES[t["cause"]])}">{t["cause"]}</span>'
        values = [f"{t[name]:+.3f}" for name in ("d", "d_weight", "d_act", "d_num")]
        replayed = "-" if t["replayed"] is None else f"{t['replayed']:+.3f}"
        rows.append((False, [text, f"{t['rollout']:.3f}", f"{t['actor']:.3f}", *values, flips, replayed, badge]))
    return _table(head, rows, text_first=True)


def _footer(about: dict) -> str:
    versions = ", ".join(f"{name} {escape(str(version))}" for name, version in about["versions"].items())
    others = plural(about["calibration_prompts"], "other response")
    return (
        f"<footer><p>Masks were chosen from the statistics of {others} and then frozen, as between two weight syncs. "
        "Standard errors count a response as one observation. GEMM time and bytes are counted from shapes at the peak "
        "rates of GPUs with NVFP4 units, not timed.</p>"
        f"<p><code>{escape(about['command'])}</code></p><p>{versions} &middot; seed {about['seed']} &middot; "
        f"{about['seconds']:g} s. The rules behind the verdict are in docs/diagnose.md.</p></footer>"
    )


# -- parts


def _figure(drawings: Mapping[str, str], name: str, label: str) -> str:
    if name not in drawings:
        return ""
    return f'<figure role="img" aria-label="{escape(label)}">{drawings[name]}</figure>'


def _table(head: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]], text_first: bool = False) -> str:
    """rows: (highlighted, cells); cells are HTML."""
    lines = []
    for chosen, cells in rows:
        first = f'<td class="text">{cells[0]}</td>' if text_first else f"<td>{cells[0]}</td>"
        rest = "".join(f"<td>{cell}</td>" for cell in cells[1:])
        mark = ' class="chosen"' if chosen else ""
        lines.append(f"<tr{mark}>{first}{rest}</tr>")
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _by_arm(results: dict, name: str) -> dict | None:
    return next((arm for arm in results["arms"] if arm["arm"] == name), None)


def _chosen(results: dict) -> dict | None:
    """The measurement behind the verdict: of the ratio series where there is one."""
    verdict = results["verdict"]
    if verdict["arm"] is None:
        return None
    if verdict["arm"] != "naive":
        for one in results["ratios"]:
            if one["ratio"] == verdict["ratio"]:
                return one
    return _by_arm(results, verdict["arm"])


def _is_chosen(arm: dict, results: dict) -> bool:
    verdict = results["verdict"]
    return arm["arm"] == verdict["arm"] and arm["ratio"] == verdict["ratio"]


def _recommended(results: dict) -> str:
    verdict = results["verdict"]
    return (
        f"arm {verdict['arm']} (ratio {verdict['ratio']:g})" if verdict["arm"] == "quads" else f"arm {verdict['arm']}"
    )


def _plus_minus(summary: dict) -> str:
    error = summary["error"]
    spread = f' <span class="soft">&plusmn; {_number(error)}</span>' if error == error and error > 0 else ""
    return f"{_number(summary['mean'])}{spread}"


def _p99(arm: dict) -> str:
    return _number(arm["parts"]["d"]["p99"]) if has_percentiles(arm) else "-"


def _number(value: float) -> str:
    """Three significant digits, or a power of ten where that would be long."""
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
