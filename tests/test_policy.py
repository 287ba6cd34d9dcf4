"""The demo's policy: tokenizer, task, training, outliers, and the two that ship."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quads_recipe.paths import POLICIES, policy_dir
from quads_recipe.policy import cli, make, outliers, pretrain, task
from quads_recipe.policy.tokenizer import CHARACTERS, VOCAB_SIZE, build_tokenizer

FEW = pretrain.TrainingSettings(clean_steps=2, imperfect_steps=2, batch_size=8)


def silent(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model():
    return pretrain.build_model(seed=0).eval()


def test_tokenizer_has_one_token_per_character_and_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = one.encode(CHARACTERS, add_special_tokens=False)
        assert len(set(ids)) == len(CHARACTERS) and one.unk_token_id not in ids
        assert one.decode(ids) == CHARACTERS
        assert len(one) == VOCAB_SIZE


def test_chat_template_ends_assistant_turns_and_opens_the_next(tokenizer):
    messages = [*task.chat("1+2="), {"role": "assistant", "content": "1+2=3"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>1+2=<|assistant|>1+2=3<eos>"
    ids = pretrain.prompt_ids(tokenizer, task.Problem("1+2=", {}))
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "1", "+", "2", "=", "<|assistant|>"]


def test_heldout_problems_are_in_no_training_set():
    heldout = {p.prompt for p in task.problems("heldout", 300)}
    for purpose in ("demonstrations", "imperfect_demonstrations", "train"):
        assert not heldout & {p.prompt for p in task.problems(purpose, 3000)}


def test_problems_depend_on_purpose_and_seed_only():
    def draw(*arguments):
        return [p.prompt for p in task.problems(*arguments)]

    assert draw("train", 20) == draw("train", 20)
    assert draw("train", 20) != draw("train", 20, 1)
    assert draw("train", 20) != draw("demonstrations", 20)


def test_worked_answers_reach_the_answer_of_reasoning_gym():
    chosen = task.problems("train", 200)
    answers = [task.worked_answer(p.prompt) for p in chosen]
    assert [a.split("=")[-1] for a in answers] == [p.answer for p in chosen]
    assert task.worked_answer("98-93+77=") == "98-93=5;5+77=82"
    assert max(len(a) for a in answers) < task.MAX_RESPONSE_TOKENS
    assert max(len(p.prompt) for p in chosen) + 2 <= task.MAX_PROMPT_TOKENS


def test_imperfect_demonstrator_errs_at_its_rate_and_carries_mistakes_on():
    rng = random.Random(0)
    wrong = total = 0
    for problem in task.problems("train", 500):
        previous = None
        for step in task.worked_answer(problem.prompt, 0.2, rng).split(";"):
            left, result = step.split("=")
            assert previous is None or left.startswith(previous)
            previous = result
            error = int(result) - eval(left)
            assert error in (0, 1, -1, 10, -10)
            wrong, total = wrong + (error != 0), total + 1
    assert abs(wrong / total - 0.2) < 4 * (0.2 * 0.8 / total) ** 0.5


def test_same_seed_gives_the_same_weights():
    def weights(seed):
        settings = pretrain.TrainingSettings(seed=seed, clean_steps=2, imperfect_steps=2, batch_size=8)
        with pretrain.one_thread():
            trained, _ = pretrain.train(settings, silent)
        return torch.cat([p.detach().flatten() for p in trained.parameters()])

    first = weights(0)
    assert first.numel() == 996_736
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


@pytest.mark.parametrize("strength", [16.0, 10.0])
def test_outliers_keep_the_function(model, strength):
    ids = torch.randint(6, 20, (4, 30), generator=torch.Generator().manual_seed(0))
    before, inputs_before = _logits_and_expert_input(model, ids)
    outliers.add_outliers(model, outliers.OutlierSettings(strength=strength))
    after, inputs_after = _logits_and_expert_input(model, ids)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)

    def peak(x):
        return (x.abs().amax() / x.square().mean().sqrt()).item()

    assert peak(inputs_after) > 1.5 * peak(inputs_before)


def _logits_and_expert_input(model, ids):
    seen = []
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    hook.remove()
    return logits, seen[0]


def test_power_of_two_outliers_are_exact_in_bf16(model):
    """Adding outliers before or after rounding to bf16 gives the same stored weights."""
    pretrain.round_to_bf16(model)
    outliers.add_outliers(model, outliers.OutlierSettings())
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    pretrain.round_to_bf16(model)
    assert all(torch.equal(p, stored[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"strength": 0.0}, "strength: 0.0"),
        ({"norm_channels": 129}, "norm_channels: 129"),
        ({"mlp_channels": -1}, "-1"),
    ],
)
def test_outlier_settings_that_cannot_be(model, settings, named):
    with pytest.raises(ValueError, match=named):
        outliers.add_outliers(model, outliers.OutlierSettings(**settings))


def test_a_policy_outside_the_range_is_refused_and_force_writes_it(tmp_path):
    out = tmp_path / "policy"
    with pytest.raises(make.PolicyRefused, match="outside 0.35 to 0.6"):
        make.make_policy(out, training=FEW, n_problems=8, report=silent)
    assert not out.exists()
    card = make.make_policy(out, training=FEW, force=True, n_problems=8, report=silent)
    assert card["pass_at_1"]["mean"] < 0.35
    assert json.loads((out / make.CARD).read_text()) == card
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16 and loaded.config.eos_token_id == 1
    with pytest.raises(FileExistsError, match="not empty"):
        make.make_policy(out, training=FEW, report=silent)


def test_command_line_reports_a_wrong_source(tmp_path, capsys):
    assert cli.main(["--out", str(tmp_path / "out"), "--from", str(tmp_path / "none")]) == 1
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--error-rate", "1", "1 is no probability"),
        ("--error-rate", "-0.1", "-0.1 is no probability"),
        ("--error-rate", "nan", "nan is no probability"),
        ("--error-rate", "often", "'often' is no number"),
        ("--clean-steps", "-1", "-1 is not a number of steps"),
        ("--imperfect-steps", "-5", "-5 is not a number of steps"),
        ("--imperfect-steps", "2.5", "'2.5' is no whole number"),
        ("--seed", str(2**63), "is not within 64 bits"),
        ("--layers", "0", "0 layers make no model"),
        ("--layers", "deep", "'deep' is no whole number"),
        ("--outlier-strength", "4", "no outliers without --variant outlier"),
        ("--outlier-strength", "inf", "inf is not above 0 and finite"),
        ("--outlier-strength", "0", "0 is not above 0"),
        ("--from", "", "'' names no folder"),
        ("--out", "", "'' names no folder"),
        ("--out", __file__, "is a file; give a folder"),
        ("--out", f"{__file__}/deep", "is a file; give a folder"),
        ("--out", str(Path(__file__).parent), "is not empty"),
    ],
)
def test_wrong_arguments_are_named_before_any_training(option, value, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make, "make_policy", lambda *_a, **_k: pytest.fail("training was started"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--out", str(tmp_path / "out"), option, value])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and f"argument {option}: " in err and said in err


@pytest.mark.parametrize("option", ["--seed", "--layers", "--clean-steps"])
def test_options_of_the_training_are_refused_where_nothing_is_trained(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--out", str(tmp_path / "out"), "--from", str(policy_dir("natural")), option, "8"])
    assert f"argument {option}: not with --from" in capsys.readouterr().err


def test_a_deeper_policy(tmp_path):
    training = pretrain.TrainingSettings(layers=6, clean_steps=1, imperfect_steps=0, batch_size=8)
    card = make.make_policy(tmp_path, training=training, force=True, n_problems=8, report=silent)
    assert card["training"]["layers"] == 6
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 6


def test_arguments_at_their_limits_are_taken(tmp_path):
    given = ["--out", str(tmp_path), "--error-rate", "0", "--clean-steps", "0", "--imperfect-steps", "0"]
    args = cli.parser().parse_args([*given, "--seed", "-1", "--outlier-strength", "0.5"])
    assert (args.out, args.error_rate, args.clean_steps, args.imperfect_steps) == (tmp_path, 0.0, 0, 0)
    assert cli.parser().parse_args(["--out", str(tmp_path / "a" / "b")]).out == tmp_path / "a" / "b"


@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policy_has_the_pass_rate_of_its_card(name):
    folder = policy_dir(name)
    card = json.loads((folder / make.CARD).read_text())
    with pretrain.one_thread():
        sampled = pretrain.pass_rate(*make.load(folder), n_problems=128, samples=2, seed=1)
    assert make.PASS_RANGE[0] <= card["pass_at_1"]["mean"] <= make.PASS_RANGE[1]
    assert abs(sampled.mean - card["pass_at_1"]["mean"]) < 4 * sampled.standard_error


def test_shipped_outlier_policy_is_the_natural_one_with_outliers():
    natural, _ = make.load(policy_dir("natural"))
    card = json.loads((policy_dir("outlier") / make.CARD).read_text())
    outliers.add_outliers(natural, outliers.OutlierSettings(**card["outliers"]))
    shipped = dict(make.load(policy_dir("outlier"))[0].named_parameters())
    assert all(torch.equal(p, shipped[name]) for name, p in natural.named_parameters())
    assert sum(f.stat().st_size for f in policy_dir("outlier").iterdir()) < 2.5e6
