"""The report of `quads diagnose`: one dict of plain values, and everything that is written from it.

diagnose.json is that dict; arms.csv, ratios.csv, layers.csv, left_out.csv and tokens.csv are its tables, *.png its
drawings, and diagnose.html all of it on one page that needs nothing else.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis import decompose
from quads_recipe.analysis.cost import Shape
from quads_recipe.analysis.evidence import has_percentiles
from quads_recipe.analysis.layers import LayerErrors, SiteErrors, by_kind
from quads_recipe.analysis.measure import ArmResult, LeftOut
from quads_recipe.analysis.tokens import CAUSES, TokenReport, causes
from quads_recipe.analysis.verdict import Verdict

PAGE = "diagnose.html"
AGREES = 1e-5
"""|d_num| up to which a token counts as reproduced by the trainer's emulation, nats: FP32's noise."""
_TAILS = [10 ** (-i / 10) for i in range(41)]
"""Shares of tokens at which the distribution of |d| is noted, from all to one in 10^4."""


def contents(
    *,
    about: dict,
    settings: QuadsSettings,
    arms: Mapping[str, ArmResult],
    series: Mapping[float, ArmResult],
    own: Mapping[float, ArmResult],
    layers: LayerErrors | None,
    left_out: Sequence[LeftOut],
    tokens: Sequence[TokenReport],
    verdict: Verdict,
    shape: Shape,
) -> dict:
    """What diagnose.json holds. Differences are in nats, costs relative to a BF16 rollout.

    series: ratios on common tokens. own: the same ratios on the tokens that each rollout sampled itself.
    """
    return {
        "about": about,
        "settings": settings.to_dict(),
        "verdict": dataclasses.asdict(verdict),
        "arms": [_arm(result) for result in arms.values()],
        "ratios": [_arm(result) | {"own": dataclasses.asdict(own[r].summary["d"])} for r, result in series.items()],
        "sites": [_site(errors, shape) for errors in layers.by_site.values()] if layers else [],
        "kinds": [_kind(name, errors, shape) for name, errors in by_kind(layers.by_site).items()] if layers else [],
        "left_out": [dataclasses.asdict(one) for one in left_out],
        "tokens": [dataclasses.asdict(token) for token in tokens],
    }


def write(folder: Path, results: dict) -> Path:
    """Write everything into `folder`; returns the path of the HTML page.

    Files appear there when all of them are written: an earlier report stays whole where that fails (OSError).
    """
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
        _write(Path(part), results)
        for file in Path(part).iterdir():
            file.replace(folder / file.name)
    return folder / PAGE


def _write(folder: Path, results: dict) -> None:
    from quads_recipe import diagnose_html, diagnose_plots

    (folder / "diagnose.json").write_text(json.dumps(results, indent=1, allow_nan=True) + "\n")
    for name, rows in tables(results).items():
        if rows:
            with open(folder / f"{name}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    drawings = diagnose_plots.draw_all(results)
    for name, drawing in drawings.items():
        (folder / f"{name}.png").write_bytes(drawing.png)
    page = diagnose_html.page(results, {name: d.svg for name, d in drawings.items()})
    (folder / PAGE).write_text(page, encoding="utf-8")


def tables(results: dict) -> dict[str, list[dict]]:
    """Name of the CSV file -> its rows."""
    return {
        "arms": [_flat(arm) for arm in results["arms"]],
        "ratios": [_flat(arm) for arm in results["ratios"]],
        "layers": [_site_row(site, ratio) for site in results["sites"] for ratio in site["ratios"]],
        "left_out": [
            {**{k: one[k] for k in ("unit", "mean", "removed", "error")}, "products": one["cost"]["products"]}
            for one in results["left_out"]
        ],
        "tokens": [{**t, "flipped_layers": " ".join(map(str, t["flipped_layers"]))} for t in results["tokens"]],
    }  # fmt: skip


def terminal_lines(results: dict) -> list[str]:
    """The table of arms and the verdict, for the terminal."""
    columns = ("arm", "mean |d|", "p99", "max", "|d_weight|", "|d_act|", "|d_num|", "GEMM time")
    rows = [columns]
    for arm in results["arms"]:
        parts = arm["parts"]
        values = [parts["d"]["mean"], parts["d"]["p99"] if has_percentiles(arm) else None, parts["d"]["max"]]
        values += [parts[name]["mean"] for name in decompose.PARTS]
        shown = ("-" if value is None else f"{value:.2e}" for value in values)
        rows.append((arm["arm"], *shown, f"{arm['cost']['products']:.0%}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = ["", *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows), ""]
    verdict = results["verdict"]
    cautions = [f"CAUTION: {text}" for text in verdict["cautions"]]
    return [*lines, *cautions, verdict["headline"], *(f"{f['title']}: {f['text']}" for f in verdict["findings"])]


def _arm(result: ArmResult) -> dict:
    d = result.parts.d
    reasons = causes(result)
    size = d.abs()
    total = size.sum().item()
    by_cause = dict.fromkeys(CAUSES, 0.0)
    for reason, value in zip(reasons, size.tolist(), strict=True):
        by_cause[reason] += value / total if total else 0.0
    flips = None
    if result.flips is not None:
        flips = {
            "tokens": result.flips.layers.any(-1).double().mean().item(),
            "mismatch": result.flip_share(),
            "by_layer": result.flips.layers.double().mean(0).tolist(),
        }
    return {
        "arm": result.arm,
        "actor": result.settings.actor.mode,
        "rollout": result.settings.rollout.mode,
        "ratio": result.settings.rollout.residual.ratio,
        "tokens": d.numel(),
        "sequences": len(result.tokens.samples),
        "nonfinite": decompose.nonfinite(result.parts),
        "sum_error": result.parts.error(),
        "engine_agrees": (result.parts.num.abs() <= AGREES).double().mean().item(),
        "parts": {name: dataclasses.asdict(summary) for name, summary in result.summary.items()},
        "mean_exp_abs": decompose.mean_exp_abs(d),
        "k3": decompose.k3(d),
        "causes": by_cause,
        "flips": flips,
        "cost": dataclasses.asdict(result.cost),
        "tail": [[share, decompose.quantile(size, 1 - share)] for share in _TAILS if share * d.numel() >= 1],
    }


def _site(errors: SiteErrors, shape: Shape) -> dict:
    site = errors.site
    return {"site": site.name, "layer": site.layer, "kind": site.kind, "k": site.k, "n": site.n,
            "experts": site.experts, "flops": site.flops / _flops(shape), **_errors(errors)}  # fmt: skip


def _kind(name: str, errors: SiteErrors, shape: Shape) -> dict:
    members = [site for site in shape.sites.values() if site.kind == name]
    share = sum(site.flops for site in members) / _flops(shape)
    return {"kind": name, "sites": len(members), "flops": share} | _errors(errors)


def _flops(shape: Shape) -> int:
    return sum(site.flops for site in shape.sites.values()) + shape.other_flops


def _errors(errors: SiteErrors) -> dict:
    return {
        "tokens": errors.rows,
        "weight_error": errors.weight_error,
        "fp8_error": errors.fp8_error,
        "ratios": {
            f"{ratio:g}": {
                "error": errors.activation_error(ratio),
                "covered": errors.energy_covered(ratio),
                "removed": errors.energy_removed(ratio),
            }
            for ratio in errors.error
        },
    }


def _flat(arm: dict) -> dict:
    row = {key: arm[key] for key in ("arm", "actor", "rollout", "ratio", "tokens", "sequences", "nonfinite")}
    for part, summary in arm["parts"].items():
        prefix = "d" if part == "d" else f"d_{part}"
        row |= {f"{prefix}_{name}": value for name, value in summary.items()}
    if "own" in arm:
        row |= {f"own_{name}": value for name, value in arm["own"].items()}
    row |= {key: arm[key] for key in ("sum_error", "engine_agrees", "mean_exp_abs", "k3")}
    row |= {f"cause_{cause}": share for cause, share in arm["causes"].items()}
    return row | {f"cost_{name}": value for name, value in arm["cost"].items()}


def _site_row(site: dict, ratio: str) -> dict:
    kept = ("site", "layer", "kind", "k", "n", "experts", "flops", "tokens", "weight_error", "fp8_error")
    return {**{key: site[key] for key in kept}, "ratio": ratio, **site["ratios"][ratio]}
