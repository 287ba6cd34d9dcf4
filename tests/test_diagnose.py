"""`quads diagnose`: prompts, arguments, rules of the verdict, and real runs whose report is looked at in a browser."""

from __future__ import annotations

import csv
import errno
import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import support_models
import support_vllm
import torch
from safetensors.torch import load_file, save_file
from support_browser import SCHEMES, dump_with, needs_browser, screenshot

from quads_ops.settings import QuadsSettings
from quads_recipe import diagnose, diagnose_html, diagnose_plots, diagnose_report, diagnose_run
from quads_recipe.analysis import evidence, verdict
from quads_recipe.analysis.cost import Cost
from quads_recipe.analysis.decompose import decompose, summarize
from quads_recipe.analysis.measure import ArmResult, LeftOut
from quads_recipe.analysis.prompts import PromptError, fitting, read_prompts, tokenize, unknown_share, unknown_warning
from quads_recipe.analysis.rollouts import RolloutKey, TokenSet, key_of
from quads_recipe.analysis.score import Sample
from quads_recipe.analysis.tokens import CAUSES, cause_of
from quads_recipe.paths import POLICIES

CHAT = [{"role": "user", "content": "1+2="}]
SUMS = [f"{a}+{b}=" for a in range(11, 31) for b in (24, 35, 46)]


# --- prompts


def test_prompts_from_every_format(tmp_path):
    (tmp_path / "a.txt").write_text("1+2=\n\n3+4=\n")
    lines = [json.dumps(v) for v in ("1+2=", {"prompt": "3+4="}, {"prompt": CHAT}, {"messages": CHAT})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pandas.DataFrame({"prompt": [CHAT, CHAT]}).to_parquet(tmp_path / "a.parquet")
    assert read_prompts(tmp_path / "a.txt") == ["1+2=", "3+4="]
    assert read_prompts(tmp_path / "a.jsonl") == ["1+2=", "3+4=", CHAT, CHAT]
    assert read_prompts(tmp_path / "a.parquet") == [CHAT, CHAT]


def test_text_becomes_a_user_message_where_there_is_a_template():
    tokenizer = support_models.tiny_tokenizer()
    [chat], [text], [raw] = (
        tokenize([p], tokenizer, raw=r) for p, r in ((CHAT, False), ("1+2=", False), ("1+2=", True))
    )
    assert chat == text and tokenizer.decode(chat) == "<|user|>1+2=<|assistant|>"
    assert tokenizer.decode(raw) == "1+2="
    tokenizer.chat_template = None
    assert tokenize(["1+2="], tokenizer) == [raw]
    with pytest.raises(PromptError, match="no chat template"):
        tokenize([CHAT], tokenizer)
    assert fitting([[], [1, 2], [1, 2, 3]], 2) == [[1, 2]]


def test_prompts_that_the_tokenizer_does_not_know():
    tokenizer = support_models.tiny_tokenizer()
    unknown = tokenizer.unk_token_id
    prompts = [[unknown, unknown, unknown], [unknown, 7]]
    assert unknown_share(prompts, tokenizer) == 0.8
    warning = unknown_warning(prompts, tokenizer)
    assert warning.startswith("--data: 80% of the prompts' tokens are <unk>") and len(warning.splitlines()) == 1
    assert unknown_warning(prompts, tokenizer, "data.train_files").startswith("data.train_files: ")
    assert unknown_warning([[unknown, *[7] * 9]], tokenizer) is None  # 10%
    assert unknown_warning([], tokenizer) is None
    tokenizer.unk_token = tokenizer.eos_token  # as tokenizers that know every byte have it
    assert unknown_share([[tokenizer.eos_token_id]], tokenizer) == 0
    tokenizer.unk_token = None
    assert unknown_share(prompts, tokenizer) == 0


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "must end in .txt, .jsonl, .parquet"),
        ("a.txt", "\n\n", "holds no prompts"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", '"fine"\n{', "prompt 2 is not JSON"),
        ("a.jsonl", '"fine"\n\n' + "9" * 5000, "prompt 2 is not JSON: Exceeds the limit"),
        ("a.jsonl", "[" * 99999 + "]" * 99999, "prompt 1 is nested too deeply"),
        ("a.jsonl", r'{"prompt": [{"role": "user", "content": "\ud800"}]}', "prompt 1: holds text that is no Unicode"),
        ("a.jsonl", '{"question": "x"}', "prompt 1: needs a text, or chat messages"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}', "prompt 1: needs a text, or chat messages"),
        ("a.parquet", "not parquet", "can't be read as parquet"),
    ],
)
def test_a_file_that_is_no_use_is_one_clear_error(tmp_path, name, content, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path, name, content))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    assert read_prompts(write(tmp_path, "a.jsonl", b'\xef\xbb\xbf"1+2="\n')) == ["1+2="]
    assert read_prompts(write(tmp_path, "a.txt", b"\xef\xbb\xbf1+2=\n")) == ["1+2="]


def test_prompts_are_counted_from_one(tmp_path):
    tokenizer = support_models.tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no\\nsystem') if messages[0].role == 'system' }}"
    prompts = ["1+2=", [{"role": "system", "content": "x"}]]
    with pytest.raises(PromptError, match="the chat template refuses prompt 2: no system$"):
        tokenize(prompts, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="prompt 2 is a chat"):
        tokenize(prompts, tokenizer)
    with pytest.raises(PromptError, match="prompt 2: needs a text"):
        read_prompts(write(tmp_path, "a.jsonl", '"fine"\n\n7'))


def test_a_prompt_that_the_tokenizer_refuses():
    def broken(text, **_):
        raise ValueError("no such token")

    broken.chat_template = None
    with pytest.raises(PromptError, match="the tokenizer refuses prompt 1: no such token"):
        tokenize(["x"], broken)


def test_a_parquet_without_prompts_names_its_columns(tmp_path):
    pandas.DataFrame({"question": ["x"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(PromptError, match="has no column `prompt`.*it has question"):
        read_prompts(tmp_path / "a.parquet")


# --- arguments


@pytest.fixture(scope="module", autouse=True)
def _fresh_cpu_worker():
    with support_vllm.fresh_cpu_worker():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return support_models.save_checkpoint(tmp_path_factory.mktemp("models") / "tiny_qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("data"), "sums.txt", "\n".join(SUMS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "quads,w4"], "--arms 'quads,w4': w4 is no arm; use bf16, fp8"),
        (["--arms", ""], "nothing is no arm"),
        (["--ratios", "0,half"], "needs numbers in [0, 1]"),
        (["--ratios", "2"], "a ratio is a share of the channels"),
        (["--prompts", "0"], "--prompts 0: must be at least 1"),
        (["--max-new", "100000"], "no prompt leaves room for --max-new 100000 tokens in the model's context of 256"),
        (["--seed", "-1"], "--seed -1: must be from 0 to 2^62 - 1"),
        (["--seed", str(1 << 64)], f"--seed {1 << 64}: must be from 0"),
        (["--data", "none.txt"], "none.txt: no such file"),
        (["--model", "none"], "has no config.json"),
        (["--model", ""], "--model '': names no model"),
        (["--targets", "re:.*q_proj"], "quads.targets = 're:.*q_proj': splits what the rollout multiplies as one"),
        (["--exclude", "model.layers.7.mlp"], "quads.exclude = 'model.layers.7.mlp': matches no module"),
        (["--exclude", "model.layers.0.self_attn.q_proj"], "quantize all of"),
        (["--targets", "re:["], "is not a regular expression"),
        (["--scope", "token", "--score", "weighted"], "quads.rollout.residual.score = 'weighted'"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(checkpoint, sums, tmp_path, capsys, options, message):
    """Before any engine starts: none of these takes longer than building the model on paper."""
    status = diagnose.main(["--model", str(checkpoint), "--data", str(sums), "--out", str(tmp_path / "out"), *options])
    err = capsys.readouterr().err.strip()
    assert status == 2
    assert message in err and len(err.splitlines()) == 1 and err.startswith("quads diagnose: ")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be(checkpoint, sums, tmp_path, capsys):
    (tmp_path / "file").touch()
    base = ["--model", str(checkpoint), "--data", str(sums)]
    assert diagnose.main([*base, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "can't write there" in capsys.readouterr().err
    assert diagnose.main([*base, "--out", str(tmp_path / "file")]) == 2
    assert f"--out: {tmp_path / 'file'} is a file; give a folder" in capsys.readouterr().err
    assert diagnose.main([*base, "--out", ""]) == 2
    assert "--out: '' names no folder; give one" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_leaves_the_last_one_whole(tmp_path, monkeypatch):
    (tmp_path / "diagnose.json").write_text("the last one")

    def full(folder, results):
        (folder / "diagnose.json").write_text("half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(diagnose_report, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        diagnose_report.write(tmp_path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["diagnose.json"]
    assert (tmp_path / "diagnose.json").read_text() == "the last one"


def test_the_check_of_the_output_folder_leaves_nothing(tmp_path):
    assert list(diagnose._out_folder(str(tmp_path / "out")).iterdir()) == []


def test_prompts_that_are_unusual_but_valid(tmp_path):
    """Characters that end a line for Python alone; a chat beside a null."""
    chat = [{"role": "user", "content": "1+2="}]
    lines = [json.dumps("1+2\u2028=\u0085", ensure_ascii=False), json.dumps({"prompt": None, "messages": chat})]
    (tmp_path / "p.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl") == ["1+2\u2028=\u0085", chat]
    (tmp_path / "p.txt").write_text("1+2\u2028=\n3+4=\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.txt") == ["1+2\u2028=", "3+4="]


@pytest.mark.parametrize("value", [None, 1.5, 7, True])
def test_a_prompt_that_is_neither_text_nor_chat(tmp_path, value):
    pandas.DataFrame({"prompt": [value, value]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(PromptError, match="row 1: needs a text, or chat messages"):
        read_prompts(tmp_path / "p.parquet")


def test_a_checkpoint_without_a_weight(checkpoint, sums, tmp_path, capsys):
    """transformers would start it at random, and the figures would mean nothing."""
    shutil.copytree(checkpoint, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    base = ["--model", str(tmp_path / "m"), "--data", str(sums), "--out", str(tmp_path / "out")]
    assert diagnose.main(base) == 2
    assert "lacks model.norm.weight, which would start at random" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def copied(checkpoint: Path, folder: Path, name: str = "config.json", **values) -> Path:
    """A copy with other values in one of its JSON files."""
    shutil.copytree(checkpoint, folder)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    return folder


def refused(model: Path, data: Path, capsys, *parts: str) -> None:
    out = model.parent / "out"
    assert diagnose.main(["--model", str(model), "--data", str(data), "--out", str(out)]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("quads diagnose: --model") and len(err.splitlines()) == 1
    assert all(part in err for part in parts), err
    assert not out.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(checkpoint, sums, tmp_path, capsys, value):
    """Before the engine starts, which would only find logprobs that are NaN."""
    shutil.copytree(checkpoint, tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights["model.layers.1.mlp.gate.weight"][2, 3] = value
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    refused(tmp_path / "m", sums, capsys, "model.safetensors holds NaN or infinity in model.layers.1.mlp.gate.weight")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("config.json", "num_experts_per_tok", 0),
        ("config.json", "num_experts_per_tok", 5),
        ("config.json", "max_position_embeddings", 0),
        ("config.json", "num_hidden_layers", 1),
        ("config.json", "hidden_size", "wide"),
        ("config.json", "architectures", None),
        ("config.json", "architectures", ["Qwen3MoeModel"]),
        ("generation_config.json", "eos_token_id", "<eos>"),
        ("tokenizer_config.json", "eos_token", 7),
    ],
)
def test_files_that_make_no_model(checkpoint, sums, tmp_path, capsys, name, field, value):
    refused(copied(checkpoint, tmp_path / "m", name, **{field: value}), sums, capsys, f"{name}: {field} = ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["null", "[" * 99999, "{"])
def test_files_that_are_broken(checkpoint, sums, tmp_path, capsys, name, content):
    shutil.copytree(checkpoint, tmp_path / "m")
    (tmp_path / "m" / name).write_text(content)
    refused(tmp_path / "m", sums, capsys, f": {name} ", "copy it again")


def test_a_model_without_a_tokenizer(checkpoint, sums, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(tmp_path / "m", sums, capsys, "has no tokenizer: no file with its vocabulary; save the model's tokenizer")


def test_a_tokenizer_of_another_model(checkpoint, tmp_path, capsys):
    support_models.save_checkpoint(tmp_path / "m", "qwen3_moe", vocab_size=40)
    fine = write(tmp_path, "fine.txt", "12")
    request = diagnose.request_from(
        diagnose.parser().parse_args(["--model", str(tmp_path / "m"), "--data", str(fine), "--raw"])
    )
    assert diagnose_run.prepare(request, print).prompts  # its other tokens are no concern
    letters = write(tmp_path, "letters.txt", "xyz")
    refused(tmp_path / "m", letters, capsys, "gives a prompt token", "config.json: vocab_size = 40")


def test_unknown_prompts_are_told_before_the_engine_starts(checkpoint, tmp_path):
    def told(name: str, text: str) -> list[str]:
        options = ["--model", str(checkpoint), "--data", str(write(tmp_path, name, text))]
        said: list[str] = []
        diagnose_run.prepare(diagnose.request_from(diagnose.parser().parse_args(options)), said.append)
        return [line for line in said if line.startswith("WARNING: ")]

    [line] = told("greek.txt", "αβγδ\nεζηθ")
    assert "67% of the prompts' tokens are <unk>" in line  # four of six: the template's two are known
    assert told("sums.txt", "1+2=\n3+4=") == []


@pytest.mark.parametrize(
    ("raised", "where", "status"),
    [
        (diagnose_run.DiagnoseError("x"), "prepare", 2),
        (diagnose_run.DiagnoseError("x"), "diagnose", 1),
        (KeyboardInterrupt(), "prepare", 130),
        (KeyboardInterrupt(), "diagnose", 130),
    ],
)
def test_exit_status(checkpoint, sums, tmp_path, monkeypatch, capsys, raised, where, status):
    def fail(*_):
        raise raised

    monkeypatch.setattr(diagnose_run, "prepare", lambda *_: None)
    monkeypatch.setattr(diagnose_run, where, fail)
    base = ["--model", str(checkpoint), "--data", str(sums), "--out", str(tmp_path / "out")]
    assert diagnose.main(base) == status
    assert capsys.readouterr().err.startswith("quads diagnose: ")


def test_a_report_that_cannot_be_written_is_a_failure(checkpoint, sums, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(diagnose_run, "prepare", lambda *_: None)
    monkeypatch.setattr(diagnose_run, "diagnose", lambda *_: {"about": {}})
    monkeypatch.setattr(diagnose_report, "_write", full)
    base = ["--model", str(checkpoint), "--data", str(sums), "--out", str(tmp_path / "out")]
    assert diagnose.main(base) == 1
    assert "can't write the report: No space left on device" in capsys.readouterr().err


def test_end_tokens_of_the_job(checkpoint, tmp_path):
    tokenizer = support_models.tiny_tokenizer()
    assert diagnose_run.stop_tokens(str(copied(checkpoint, tmp_path / "a")), tokenizer) == (1,)
    several = copied(checkpoint, tmp_path / "b", "generation_config.json", eos_token_id=[1, 3])
    assert diagnose_run.stop_tokens(str(several), tokenizer) == (1, 3)
    (several / "generation_config.json").unlink()
    assert diagnose_run.stop_tokens(str(several), tokenizer) == (tokenizer.eos_token_id,)


def test_the_ends_belong_to_the_series():
    assert diagnose.parse_ratios("0.5") == [0, 0.5, 1]
    assert diagnose.parse_ratios("") == []
    assert diagnose.parse_arms("quads, bf16") == ["bf16", "quads"]


def test_arms_with_the_same_rollout_share_its_tokens():
    assert key_of("naive") == key_of("qat") == key_of("symmetric") == RolloutKey("w4a4", 0.0)
    assert len({key_of(arm) for arm in ("bf16", "fp8", "naive", "quads", "quads_full")}) == 5


def test_the_command_is_repeated_without_this_machines_folders():
    args = diagnose.parser().parse_args(["--model", "/a/b", "--data", "/c/d.txt", "--prompts", "8", "--raw"])
    assert diagnose.command_line(args) == "quads diagnose --model b --data d.txt --prompts 8 --raw"


# --- rules


@pytest.mark.parametrize(
    ("weight", "act", "num", "replayed", "flips", "cause"),
    [
        (0.1, 0.1, 0.3, 0.0, 3, "engine"),
        (0.0, 0.4, 0.1, 0.01, 1, "routing"),
        (0.0, 0.4, 0.1, 0.01, 0, "activations"),  # nothing flipped
        (0.0, 0.4, 0.1, 0.3, 1, "activations"),  # a flip that explains less than half
        (0.4, -0.1, 0.0, None, 0, "weights"),  # dense
    ],
)
def test_the_cause_of_a_token(weight, act, num, replayed, flips, cause):
    assert cause_of(weight, act, num, replayed, flips) == cause and cause in CAUSES


def result(
    arm: str,
    size: float,
    *,
    weight: float = 0.0,
    products: float = 0.25,
    ratio: float = 0.0,
    shape: tuple[int, int] = (20, 50),
) -> ArmResult:
    """As many sequences of as many tokens, with d of that mean magnitude."""
    sequences, length = shape
    sequence = torch.arange(sequences).repeat_interleave(length)
    actor = torch.full((sequences * length,), -2.0)
    sign = torch.where(torch.arange(sequences * length) % 2 == 0, 1.0, -1.0)
    weights = actor + weight * sign
    rollout = actor + size * sign
    parts = decompose(rollout, actor, weights, rollout)
    samples = tuple(Sample((1,), (2,) * length) for _ in range(sequences))
    settings = QuadsSettings.from_dict({"arm": arm})
    tokens = TokenSet(RolloutKey("w4a4", ratio), samples, rollout, sequence, None)
    return ArmResult(arm, settings, tokens, parts, summarize(parts, sequence), Cost(products, 0.3, 0.0), None)


def series(*means: float, **options) -> dict[float, ArmResult]:
    ratios = [i / (len(means) - 1) for i in range(len(means))]
    cost = {r: 0.25 * (1 + r) for r in ratios}
    return {r: result("quads", m, products=cost[r], ratio=r, **options) for r, m in zip(ratios, means, strict=True)}


def test_the_cheapest_rollout_that_reaches_the_target_is_chosen():
    arms = {"fp8": result("fp8", 0.02), "naive": result("naive", 0.1, weight=0.05)}
    chosen = verdict.choose(arms, series(0.05, 0.03, 0.015, 0.01, 0.005))
    assert (chosen.arm, chosen.ratio) == ("quads", 0.5)
    assert verdict.choose(arms, series(0.01, 0.005, 0.001)).arm == "qat"
    assert verdict.choose(arms | {"naive": result("naive", 0.02)}, series(0.01, 0.005, 0.001)).arm == "naive"
    least = verdict.choose(arms, series(0.05, 0.04, 0.03))
    assert (least.arm, least.ratio) == ("quads_full", 1.0)
    assert not verdict.Target(arms).met_by(least)


def test_a_mask_that_saves_nothing_is_not_recommended():
    ratios = {
        r: replace(one, cost=Cost(0.25 if r == 0 else 0.5, 0.3, 0.0)) for r, one in series(0.05, 0.01, 0.005).items()
    }
    assert verdict.choose({"fp8": result("fp8", 0.02)}, ratios).ratio == 1.0


def test_without_fp8_the_target_is_the_alarm_of_mean_exp_d():
    arms = {"naive": result("naive", 0.1)}
    assert verdict.choose(arms, series(0.06, 0.04, 0.01)).ratio == 0.5  # exp(0.04) < 1.05 < exp(0.06)
    assert verdict.choose(arms, {}).arm == "naive"
    assert verdict.choose({"bf16": result("bf16", 0.01)}, {}) is None


def left(unit: str, removed: float, products: float, error: float = 0.01) -> LeftOut:
    return LeftOut(unit, (unit,), 0.01, removed, error, Cost(products, 0.3, 0.0))


def test_layers_are_left_out_only_where_it_pays():
    ratios = series(0.05, 0.03, 0.005)
    half = verdict.Candidate("quads", 0.5, ratios[0.5])
    # Ratio 1 removes 0.025 of 0.03 (83%) for 0.125 more products: 6.7 per unit.
    found = [
        left("pays", 0.3, half.result.cost.products + 0.01),
        left("dear", 0.3, half.result.cost.products + 0.1),
        left("small", 0.05, half.result.cost.products + 0.001),
        left("noise", 0.3, half.result.cost.products + 0.01, error=0.2),
    ]
    assert [one.unit for one in verdict.worth_leaving_out(found, half, ratios)] == ["pays"]
    full = verdict.Candidate("quads_full", 1.0, ratios[1.0])
    fair = left("fair", 0.3, full.result.cost.products + 0.1)
    assert verdict.worth_leaving_out([fair, replace(fair, removed=0.15)], full, ratios) == [fair]


def test_the_verdict_says_so_where_nothing_reaches_the_target():
    arms = {"fp8": result("fp8", 0.001), "naive": result("naive", 0.1, weight=0.06), "qat": result("qat", 0.04)}
    ratios = series(0.04, 0.03, 0.02)
    pays = left("pays", 0.3, ratios[1.0].cost.products + 0.01)
    judged = verdict.judge(arms, ratios, ratios, [pays], "fp32")
    assert judged.leave_out == ("pays",)
    assert judged.meets_target is False and judged.ratio == 1.0
    assert judged.headline.startswith("No measured rollout reaches the target")
    text = {finding.title: finding.text for finding in judged.findings}
    assert "ratio 1 removes 50% of mean |d_act|" in text["Residual compensation"]
    assert "(-60%)" in text["Fake-quantized weights"]
    assert "exactly zero" in text["Fake-quantized weights"]


def judged_texts(arms, ratios=None, left_out=()) -> tuple[str, dict[str, str]]:
    ratios = ratios or series(0.04, 0.03, 0.02)
    judged = verdict.judge(arms, ratios, ratios, left_out, "fp32")
    return judged.headline, {finding.title: finding.text for finding in judged.findings}


def noisy(one: ArmResult, spread: float) -> ArmResult:
    """With another mean |d| in every other sequence."""
    sign = torch.where(one.tokens.sequence % 2 == 0, spread, -spread)
    parts = replace(one.parts, d=one.parts.d + sign * one.parts.d.sign())
    return replace(one, parts=parts, summary=summarize(parts, one.tokens.sequence))


@pytest.mark.parametrize(
    ("naive", "qat", "said"),
    [
        (result("naive", 0.1), result("qat", 0.04), "Mean |d| goes from 0.1 to 0.04 nats (-60%)."),
        (result("naive", 0.0234), result("qat", 0.0226), "Mean |d| goes from 0.0234 to 0.0226 nats (-3%)."),
        (result("naive", 0.02), result("qat", 0.02), "Mean |d| stays at 0.02 nats."),
        (
            result("naive", 0.0234),
            noisy(result("qat", 0.0226), 0.01),
            "Mean |d| is 0.0234 nats without and 0.0226 with them: no clear difference (within two standard errors, ",
        ),
        # On the same tokens: what both have in common is no doubt.
        (
            noisy(result("naive", 0.0234), 0.01),
            noisy(result("qat", 0.0226), 0.01),
            "Mean |d| goes from 0.0234 to 0.0226 nats (-3%).",
        ),
    ],
)
def test_a_change_is_told_from_none(naive, qat, said):
    _, text = judged_texts({"fp8": result("fp8", 0.02), "naive": naive, "qat": qat})
    assert text["Fake-quantized weights"].startswith(said)


def test_numbers_that_differ_look_different():
    assert verdict.distinct([0.1, 0.04]) == ["0.1", "0.04"]
    assert verdict.distinct([0.02304, 0.02296]) == ["0.02304", "0.02296"]
    assert verdict.distinct([0.02, 0.02]) == ["0.02", "0.02"]
    headline, text = judged_texts({"fp8": result("fp8", 0.01996)}, series(0.0402, 0.0398, 0.02004))
    assert "(mean |d| of an FP8 rollout, 0.01996 nats). Closest: quads_full, 0.02004 nats." in headline
    assert "0: 0.0402, 0.5: 0.0398, 1: 0.02 nats" in text["Residual compensation"]


def test_a_layer_that_removes_nothing_is_not_named_for_it():
    _, text = judged_texts({"fp8": result("fp8", 0.001)}, left_out=[left("worse", -0.1, 0.3)])
    assert text["Which layers to leave out"] == "None pays: none lowers mean |d_act| when it alone is left out."
    _, text = judged_texts({"fp8": result("fp8", 0.001)}, left_out=[left("little", 0.001, 0.3)])
    assert "removes is less than 1% of mean |d_act| (little)" in text["Which layers to leave out"]


def test_one_token_is_no_agreement():
    one = result("naive", 0.1)
    parts = replace(one.parts, **{name: getattr(one.parts, name)[:1] for name in ("d", "weight", "act", "num")})
    tokens = replace(one.tokens, samples=one.tokens.samples[:1], sequence=one.tokens.sequence[:1])
    single = replace(one, parts=parts, tokens=tokens, summary=summarize(parts, tokens.sequence))
    _, text = judged_texts({"fp8": result("fp8", 0.02), "naive": single})
    assert text["Where it comes from"].startswith(
        "Under arm naive, d is 0.1 nats on every token, which has no variance"
    )
    _, text = judged_texts({"fp8": result("fp8", 0.02), "naive": result("naive", 0.0)})
    assert text["Where it comes from"] == "Under arm naive rollout and actor agree on every token."


SMALL = [(2, 5), (8, 100), (16, 4)]
"""Sequences and their tokens: few of both, of the first, of the second."""


@pytest.mark.parametrize("shape", SMALL)
def test_too_little_data_is_said_first_and_names_no_layer(shape):
    """The same figures that name a layer where there are twenty sequences of fifty tokens."""
    arms = {"fp8": result("fp8", 0.001, shape=shape), "naive": result("naive", 0.1, shape=shape)}
    ratios = series(0.04, 0.03, 0.02, shape=shape)
    pays = left("pays", 0.3, ratios[1.0].cost.products + 0.01)
    judged = verdict.judge(arms, ratios, ratios, [pays], "fp32")
    [caution] = judged.cautions
    sequences, tokens = shape[0], shape[0] * shape[1]
    assert f"only {tokens} tokens of {sequences} responses; it takes 500 tokens of 16 responses" in caution
    assert judged.headline.startswith("On so little data no measured rollout reaches the target")
    assert judged.leave_out == ()
    texts = " ".join(finding.text for finding in judged.findings)
    assert "pays" not in texts and "Not judged" in texts
    assert ("99% of tokens below" in texts) == (tokens >= 500) == ("percentiles" not in caution)
    easy = verdict.judge(arms | {"fp8": result("fp8", 0.05, shape=shape)}, ratios, ratios, [pays], "fp32")
    assert easy.meets_target and easy.headline.startswith("On so little data the cheapest is arm qat")
    texts = " ".join(finding.text for finding in easy.findings)
    assert "pays" not in texts


def test_enough_data_needs_no_caution():
    arms = {"fp8": result("fp8", 0.001, shape=(16, 32)), "naive": result("naive", 0.1, shape=(16, 32))}
    ratios = series(0.04, 0.03, 0.02, shape=(16, 32))
    judged = verdict.judge(arms, ratios, ratios, [left("pays", 0.3, 0.26)], "fp32")
    assert judged.cautions == () and judged.leave_out == ("pays",)
    assert "99% of tokens below" in judged.findings[0].text


def test_one_small_rollout_is_enough_for_a_caution():
    """Also where it is one of the series alone, and where its tokens are many but not finite."""
    arms = {"fp8": result("fp8", 0.001), "naive": result("naive", 0.1)}
    ratios = series(0.04, 0.03, 0.02)
    own = ratios | {0.5: result("quads", 0.03, ratio=0.5, shape=(20, 2))}
    [caution] = verdict.judge(arms, ratios, own, [], "fp32").cautions
    assert "only 40 tokens of 20 responses" in caution
    broken = result("naive", 0.1)
    broken.parts.d[: 15 * 50] = float("nan")
    [caution] = verdict.judge({"naive": broken}, {}, {}, [], "fp32").cautions
    assert "only 250 tokens of 5 responses" in caution
    [caution] = verdict.judge({"bf16": result("bf16", 0.1, shape=(1, 1))}, {}, {}, [], "fp32").cautions
    assert "only 1 token of 1 response;" in caution


def test_few_responses_take_students_quantile():
    assert evidence.errors_needed(16) == 2
    assert evidence.errors_needed(8) == pytest.approx(2.365, abs=1e-3)
    assert evidence.errors_needed(2) == pytest.approx(12.706, abs=1e-3)
    assert evidence.errors_needed(1) == float("inf")


def test_a_change_of_few_responses_is_no_clear_one():
    """The same change and spread, 2.1 standard errors apart of 4 responses and 5.3 of 20."""

    def said(shape: tuple[int, int]) -> str:
        naive, qat = result("naive", 0.0234, shape=shape), noisy(result("qat", 0.0134, shape=shape), 0.0082)
        return judged_texts({"fp8": result("fp8", 0.02), "naive": naive, "qat": qat})[1]["Fake-quantized weights"]

    assert said((20, 50)).startswith("Mean |d| goes from 0.023 to 0.013 nats")
    assert "no clear difference (within 3.2 standard errors, " in said((4, 50))


def results_of(tokens: int, cautions: tuple[str, ...]) -> dict:
    """The parts of diagnose.json that terminal and arms' table read."""
    part = {"mean": 0.1, "error": 0.01, "p99": 0.777, "max": 0.9}
    one = {"arm": "naive", "actor": "off", "rollout": "w4a4", "ratio": 0.0, "tokens": tokens, "nonfinite": 0, "k3": 0.1,
           "mean_exp_abs": 1.1, "parts": dict.fromkeys(("d", "weight", "act", "num"), part),
           "cost": {"products": 0.25, "weights": 0.3}}  # fmt: skip
    findings = [{"title": "Where", "text": "there"}]
    said = {"headline": "The headline.", "findings": findings, "cautions": cautions, "arm": None, "ratio": None}
    return {"arms": [one], "ratios": [], "verdict": said | {"meets_target": True}}


def test_cautions_come_before_the_headline_in_terminal_and_page():
    results = results_of(11, ("Too <little>.", "Unknown."))
    lines = diagnose_report.terminal_lines(results)
    place = lines.index("CAUTION: Too <little>.")
    assert lines[place : place + 3] == ["CAUTION: Too <little>.", "CAUTION: Unknown.", "The headline."]
    section = diagnose_html._verdict(results)
    assert section.index("Too &lt;little&gt;.") < section.index("Unknown.") < section.index("The headline.")
    assert section.startswith('<section class="verdict missed">')
    calm = results_of(1000, ())
    assert diagnose_html._verdict(calm).startswith('<section class="verdict"><h2>')
    assert not any("CAUTION" in line for line in diagnose_report.terminal_lines(calm))


@pytest.mark.parametrize(("tokens", "shown"), [(499, False), (500, True)])
def test_percentiles_of_few_tokens_are_not_shown(tokens, shown):
    results = results_of(tokens, ())
    assert any("7.77e-01" in line for line in diagnose_report.terminal_lines(results)) == shown
    assert ("0.777" in diagnose_html._arms(results, {})) == shown
    dots = diagnose_plots.arms(results).axes[0].collections
    assert any(0.777 in dot.get_offsets()[:, 0] for dot in dots if len(dot.get_offsets())) == shown


def test_nothing_covers_a_point_of_the_ratios():
    """The lines of other arms are named outside of the axes."""
    results = results_of(1000, ())
    results["ratios"] = [results["arms"][0] | {"ratio": ratio} for ratio in (0.0, 0.5, 1.0)]
    results["arms"] = [results["arms"][0] | {"arm": name} for name in ("bf16", "fp8")]
    figure = diagnose_plots.ratios(results)
    axes = figure.axes[0]
    figure.canvas.draw()
    legend = axes.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    assert {"mean |d| of arm bf16", "mean |d| of arm fp8"} <= set(names) and not list(axes.texts)
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert legend.get_window_extent().width <= figure.bbox.width
    diagnose_plots.plt.close(figure)


def test_a_symmetric_arm_is_never_recommended():
    arms = {"fp8": result("fp8", 0.001), "symmetric": result("symmetric", 0.0)}
    ratios = series(0.04, 0.03, 0.02)
    assert verdict.judge(arms, ratios, ratios, [], "fp32").arm == "quads_full"


def test_layers_stay_where_the_target_is_met():
    ratios = series(0.04, 0.03, 0.02)
    pays = left("pays", 0.3, ratios[1.0].cost.products + 0.01)
    judged = verdict.judge({"fp8": result("fp8", 0.02)}, ratios, ratios, [pays], "fp32")
    assert judged.meets_target and judged.leave_out == ()
    text = {finding.title: finding.text for finding in judged.findings}["Which layers to leave out"]
    assert text.startswith("None: the target is met.") and "pays removes 30%" in text


def test_the_verdict_goes_by_the_rollouts_own_tokens():
    arms = {"fp8": result("fp8", 0.02)}
    judged = verdict.judge(arms, series(0.03, 0.015, 0.005), series(0.06, 0.03, 0.01), [], "fp32")
    assert judged.ratio == 1.0


# --- real runs


def run_diagnose(model: str | Path, data: Path, out: Path, *options: str) -> SimpleNamespace:
    status = diagnose.main(["--model", str(model), "--data", str(data), "--out", str(out), *options])
    assert status == 0
    return SimpleNamespace(out=out, results=json.loads((out / "diagnose.json").read_text()))


def arm(results: dict, name: str) -> dict:
    return next(one for one in results["arms"] if one["arm"] == name)


@pytest.fixture(scope="module")
def full(checkpoint, sums, tmp_path_factory) -> SimpleNamespace:
    """All arms and ratios of a random Qwen3-MoE in FP32: three engines."""
    out = tmp_path_factory.mktemp("full")
    return run_diagnose(checkpoint, sums, out, "--dtype", "fp32", "--prompts", "24", "--max-new", "20")


@pytest.mark.integration
def test_the_decomposition_adds_up(full):
    for one in full.results["arms"] + full.results["ratios"]:
        assert one["sum_error"] <= 1e-5
        shares = [one["parts"][part]["share"] for part in ("weight", "act", "num")]
        assert sum(shares) == pytest.approx(1, abs=1e-6)
        assert one["nonfinite"] == 0


@pytest.mark.integration
def test_qat_leaves_no_weight_error_and_symmetric_no_activation_error(full):
    """Zero because two forwards agree in every bit: the actor's own, and the one with the rollout's weights."""
    for name in ("qat", "symmetric", "quads", "quads_full"):
        assert arm(full.results, name)["parts"]["weight"]["max"] == 0
    assert arm(full.results, "symmetric")["parts"]["act"]["max"] == 0
    for name in ("naive", "fp8"):
        assert arm(full.results, name)["parts"]["weight"]["mean"] > 1e-3
    assert arm(full.results, "bf16")["parts"]["d"]["max"] < 1e-4


@pytest.mark.integration
def test_the_trainers_emulation_is_what_the_engine_computes(full):
    """In FP32, but for roundings on the edge: one of them changes the rest of its sequence a little."""
    assert arm(full.results, "bf16")["engine_agrees"] == 1
    for one in full.results["arms"] + full.results["ratios"]:
        assert one["engine_agrees"] > 0.7, one["arm"]
        assert one["parts"]["num"]["mean"] < 2e-3


@pytest.mark.integration
def test_compensation_lowers_the_activation_error(full):
    assert_series(full.results)


def assert_series(results: dict) -> None:
    means = [one["parts"]["act"]["mean"] for one in results["ratios"]]
    assert [one["ratio"] for one in results["ratios"]] == [0, 0.125, 0.25, 0.5, 0.75, 1]
    assert means == sorted(means, reverse=True)
    assert means[-1] <= 0.15 * means[0]
    d = [one["parts"]["d"]["mean"] for one in results["ratios"]]
    assert d == sorted(d, reverse=True)


@pytest.mark.integration
def test_layers_kinds_and_tokens_are_reported(full):
    results = full.results
    assert {site["kind"] for site in results["sites"]} == {kind["kind"] for kind in results["kinds"]}
    for site in results["sites"]:
        errors = [site["ratios"][ratio]["error"] for ratio in ("0", "0.5", "1")]
        assert errors[0] > errors[1] > errors[2]
    assert sum(kind["flops"] for kind in results["kinds"]) < 1
    units = {one["unit"] for one in results["left_out"]}
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts")
    assert units == {f"model.layers.{i}.{module}" for i in (0, 1) for module in modules}
    worst = [t for t in results["tokens"] if t["arm"] == "naive"]
    assert len(worst) == 12
    assert worst[0]["d"] == pytest.approx(max((t["d"] for t in worst), key=abs))
    for token in results["tokens"]:
        assert token["d"] == pytest.approx(token["rollout"] - token["actor"], abs=1e-6)
        assert token["d"] == pytest.approx(token["d_weight"] + token["d_act"] + token["d_num"], abs=1e-6)
    routed = [t for t in results["tokens"] if t["cause"] == "routing"]
    assert routed and all(abs(t["replayed"]) <= abs(t["d_weight"] + t["d_act"]) / 2 for t in routed)


@pytest.mark.integration
def test_the_files_agree_and_the_page_needs_nothing_else(full):
    with open(full.out / "arms.csv", newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    for one in full.results["arms"]:
        assert float(rows[one["arm"]]["d_mean"]) == one["parts"]["d"]["mean"]
    with open(full.out / "tokens.csv", newline="") as file:
        columns = set(csv.DictReader(file).fieldnames)
    assert {"d", "d_weight", "d_act", "d_num"} <= columns and not {"weight", "act", "num"} & columns
    names = {path.name for path in full.out.iterdir()}
    assert {"ratios.csv", "layers.csv", "left_out.csv", "tokens.csv"} <= names
    drawings = ("arms", "shares", "distribution", "ratios", "causes", "left_out", "layers")
    assert {f"{name}.png" for name in drawings} <= names
    page = (full.out / "diagnose.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 6
    assert not re.search(r'(src|href)="(?!#)', page.replace('xlink:href="#', 'href="#'))
    assert not re.search(r"@import|url\((?!#)|<script", page)
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:url\(|xlink:href=")#([^")]+)', page))
    assert used and all(ids.count(one) == 1 for one in used)
    assert html.escape(full.results["verdict"]["headline"]) in page


@pytest.mark.integration
@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "bf16"), ("qwen3", "bf16")])
def test_other_models_by_the_same_command(family, dtype, sums, tmp_path):
    model = support_models.save_checkpoint(tmp_path / family, family)
    options = ["--dtype", dtype, "--arms", "naive,quads", "--ratios", "0.5", "--prompts", "8", "--max-new", "12"]
    got = run_diagnose(model, sums, tmp_path / "out", *options, "--leave-out", "2")
    quads = arm(got.results, "quads")
    assert quads["parts"]["weight"]["max"] == 0 and quads["sum_error"] <= 1e-5
    assert quads["parts"]["d"]["mean"] < arm(got.results, "naive")["parts"]["d"]["mean"]
    assert (quads["flips"] is None) == (family == "qwen3")
    kinds = {kind["kind"] for kind in got.results["kinds"]}
    assert kinds >= ({"experts gate+up", "experts down"} if family == "mixtral" else {"mlp gate+up", "mlp down"})
    assert len(got.results["left_out"]) == 2
    assert got.results["verdict"]["target"] == "mean exp|d| of 1.05 (NeMo-RL's alarm)"


# --- in a browser


@needs_browser
@pytest.mark.integration
@pytest.mark.parametrize(("scheme", "paper"), SCHEMES)
def test_the_page_in_a_browser(full, tmp_path, scheme, paper):
    image = screenshot(tmp_path, full.out / "diagnose.html", scheme, (1200, 2400))
    assert image.getpixel((4, 4)) == paper
    colors = {color: count for count, color in image.getcolors(1 << 24)}
    far = [color for color in colors if max(abs(a - b) for a, b in zip(color, paper, strict=True)) > 90]
    drawn = sum(colors[color] for color in far)
    assert drawn > 0.01 * 1200 * 2400  # text and drawings, on both backgrounds
    mark = tuple(int(diagnose_plots.WEIGHT[i : i + 2], 16) for i in (1, 3, 5))
    assert colors.get(mark, 0) > 100


@needs_browser
@pytest.mark.integration
@pytest.mark.parametrize("width", [1200, 1600])
def test_nothing_is_wider_than_the_window(full, tmp_path, width):
    """Nor does a table have to be scrolled."""
    script = """
      document.querySelectorAll("details").forEach(d => d.open = true)
      const seen = [document.documentElement.scrollWidth, innerWidth]
      const tables = [...document.querySelectorAll(".scroll")].filter(t => t.scrollWidth > t.clientWidth)
      document.body.dataset.seen = [...seen, tables.length].join(" ")"""
    dom = dump_with(tmp_path, full.out / "diagnose.html", script, width)
    scroll, inner, scrolled = map(int, re.search(r'data-seen="(\d+) (\d+) (\d+)"', dom).groups())
    assert scroll <= inner == width
    assert scrolled == 0


def test_text_from_a_model_cannot_break_the_page():
    token = {"arm": "naive", "context": "<b>&", "token": "</main><script>", "rollout": -1.0, "actor": -1.0, "d": 0.0,
             "d_weight": 0.0, "d_act": 0.0, "d_num": 0.0, "flipped_layers": [1], "flips_before": 0, "replayed": 0.0,
             "cause": "routing"}  # fmt: skip
    table = diagnose_html._token_table([token])
    assert "<script>" not in table and "&lt;/main&gt;&lt;script&gt;" in table and "layer 1" in table


# --- the shipped policies


@pytest.mark.integration
@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_policies(policy, tmp_path):
    """Held-out problems of the demo; one engine."""
    from quads_recipe.demo_data import write_data

    _, heldout = write_data(tmp_path, train=1, heldout=128)
    options = ["--dtype", "fp32", "--arms", "qat,quads_full", "--prompts", "64", "--max-new", "40", "--leave-out", "0"]
    got = run_diagnose(policy, heldout, tmp_path / "out", *options)
    assert_series(got.results)
    assert got.results["verdict"]["cautions"] == []
    assert arm(got.results, "qat")["parts"]["weight"]["max"] == 0
    assert all(one["sum_error"] <= 1e-5 for one in got.results["arms"] + got.results["ratios"])
