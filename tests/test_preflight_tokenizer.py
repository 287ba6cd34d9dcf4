"""Tokenizers that can't be loaded: the message names file and field, not the prompts."""

import json
import shutil

import pytest
from support_models import tiny_tokenizer

from quads_ops.settings import SettingsError
from quads_recipe.paths import POLICIES, policy_dir
from quads_recipe.preflight_tokenizer import load

REMEDY = "save one there"
FAST, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refused(folder, *parts):
    with pytest.raises(SettingsError) as caught:
        load("--model", str(folder), REMEDY)
    text = str(caught.value)
    assert text.startswith(f"--model = {str(folder)!r}: ") and text.isprintable()
    assert all(part in text for part in parts), text


def rewrite(folder, name, *without, **values):
    document = {k: v for k, v in json.loads((folder / name).read_text()).items() if k not in without} | values
    (folder / name).write_text(json.dumps(document))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_policies_have_one(policy):
    assert load("--model", str(policy_dir(policy)), REMEDY)("1+2=")["input_ids"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token", 7),
        ("pad_token", {"a": 1}),
        ("model_max_length", "long"),
        ("model_max_length", [1]),
        ("extra_special_tokens", [1]),
        ("tokenizer_class", [1]),
        ("tokenizer_class", 0),
    ],
)
def test_a_setting_of_the_wrong_type(folder, field, value):
    rewrite(folder, CONFIG, **{field: value})
    refused(folder, f"{CONFIG}: {field} = {json.dumps(value)}; correct it")


@pytest.mark.parametrize(
    ("field", "value"), [("version", None), ("normalizer", [1]), ("pre_tokenizer", "x"), ("truncation", {"a": 1})]
)
def test_a_part_of_the_wrong_type(folder, field, value):
    rewrite(folder, FAST, **{field: value})
    refused(folder, f"{FAST}: {field} = {json.dumps(value)}; correct it")


def test_parts_that_are_missing(folder):
    rewrite(folder, FAST, "added_tokens")
    refused(folder, f"{FAST}: added_tokens = null, which must be a list of objects", "KeyError: 'added_tokens'")
    rewrite(folder, FAST, "model", added_tokens=[])
    refused(folder, f"{FAST}: Model missing")


@pytest.mark.parametrize("name", [FAST, CONFIG])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 99999, b"\xff", r'{"a": "\ud800"}'])
def test_a_file_that_is_broken(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(folder, f"{name} ", "copy it again")


def test_a_template_that_is_no_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    refused(folder, "chat_template.jinja is not UTF-8 text (byte 3)")


@pytest.mark.parametrize("config", [True, False])
def test_no_vocabulary(folder, config):
    (folder / FAST).unlink()
    if not config:
        (folder / CONFIG).unlink()
    shutil.copy(policy_dir("natural") / "config.json", folder)
    refused(folder, f"has no tokenizer: no file with its vocabulary; {REMEDY}")


def test_what_is_unusual_but_valid(folder):
    rewrite(folder, FAST, "version", normalizer=None, truncation=None)
    rewrite(folder, CONFIG, "tokenizer_class", "pad_token", unknown_field=[1], model_max_length=None)
    (folder / "chat_template.jinja").unlink()
    assert load("--model", str(folder), REMEDY)("1+2=")["input_ids"]
    (folder / CONFIG).unlink()
    assert load("--model", str(folder), REMEDY)("1+2=")["input_ids"]
