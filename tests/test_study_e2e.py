"""A whole study, as small as it gets: one run of one step through verl's trainer, and its evaluations."""

import csv
import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_a_study_of_one_run(tmp_path):
    out = tmp_path / "study"
    command = [sys.executable, "-m", "quads_recipe.cli", "study", "--policy", "natural", "--out", str(out)]
    command += ["--arms", "quads", "--seeds", "1", "--steps", "1", "--heldout", "8", "--samples", "1"]
    command += ["--set", "quads.probe.every=1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

    run = out / "runs" / "quads-seed0"
    assert json.loads((run / "done.json").read_text())["steps"] == 1 and not (run / "checkpoints").exists()
    with (out / "report" / "steps.csv").open() as file:
        [step] = csv.DictReader(file)
    assert 0 < float(step["d_mean"]) < 0.1 and float(step["receipts"]) == 1
    assert float(step["part_weight"]) == 0 and float(step["part_act"]) > 0
    with (out / "report" / "evaluations.csv").open() as file:
        engines = {(row["weights"], row["mode"]): row for row in csv.DictReader(file)}
    assert set(engines) == {("start", "bf16"), ("start", "w4a4"), ("quads", "w4a4"), ("quads", "bf16")}
    assert 0.5 < float(engines["quads", "w4a4"]["energy_covered"]) < 1
    assert (out / "report" / "study.html").stat().st_size > 50_000

    # Everything is there: the same command only writes the report again.
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "run 1/1" not in again.stdout and "evaluated" not in again.stdout
    other = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=300)
    assert other.returncode == 2 and "steps: 1 there, 2 asked for" in other.stderr
