"""The JSON files of a checkpoint: what can't be read, or is no object, is one line that names the file."""

import json

import pytest

from quads_ops.settings import SettingsError
from quads_recipe import preflight_json

NAME = "config.json"
DEEP = "[" * 100_000 + "]" * 100_000


def check(folder, content=None):
    if content is not None:
        (folder / NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    preflight_json.check("--model", folder, (NAME, "absent.json"))


BROKEN = {
    "empty": ("", "config.json is not JSON (Expecting value"),
    "cut": ('{"a": [1, ', "config.json is not JSON (Expecting value: line 1 column 11"),
    "null": ("null", "config.json holds null, and must hold an object"),
    "list": ("[1, 2]", "config.json holds [1, 2], and must hold an object"),
    "text": ('"qwen3"', 'config.json holds "qwen3", and must hold an object'),
    "long": (json.dumps(["x" * 1000]), '["xxx'),
    "digits": (f'{{"a": {"9" * 5000}}}', "config.json holds a number that can't be read"),
    "deep": (DEEP, "config.json is nested too deeply"),
    "deep-inside": (f'{{"a": {DEEP}}}', "config.json is nested too deeply"),
    "latin": (b'{"a": "\xff"}', "config.json is not UTF-8 text (byte 7)"),
    "utf-16": ("{}".encode("utf-16"), "config.json is not UTF-8 text (byte 0)"),
    "mark": (b"\xef\xbb\xbf{}", "save it without a byte order mark"),
    "surrogate": (r'{"a": {"b": [1, "\ud83d"]}}', "no Unicode (a lone surrogate) in a.b[1]"),
    "surrogate-name": (r'{"a": {"\udc00": 1}}', r"no Unicode (a lone surrogate) in 'a.\udc00'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_use(tmp_path, case):
    content, message = BROKEN[case]
    with pytest.raises(SettingsError) as caught:
        check(tmp_path, content)
    text = str(caught.value)
    assert text.startswith(f"--model = {str(tmp_path)!r}: config.json ") and message in text and "copy it again" in text
    assert len(text) < 400 + len(str(tmp_path)) and text.isprintable()


def test_what_is_no_file(tmp_path):
    (tmp_path / NAME).mkdir()
    with pytest.raises(SettingsError, match="config.json can't be read .Is a directory."):
        check(tmp_path)
    (tmp_path / NAME).rmdir()
    (tmp_path / NAME).symlink_to("gone")
    with pytest.raises(SettingsError, match="config.json can't be read .No such file"):
        check(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{}", '{"a": NaN}', '{"a": 1, "a": 2}', r'{"a": "\ud83d\ude00"}', '{"a": "\u2028é😀"}', r'{"a": "\\ud83d"}'],
)
def test_what_is_unusual_but_valid(tmp_path, text):
    check(tmp_path, text)


def test_what_is_not_there_is_no_concern(tmp_path):
    check(tmp_path)
    check(tmp_path / "hub" / "id")


def test_the_field_without_which_it_loads(tmp_path):
    (tmp_path / NAME).write_text(json.dumps({"fine": 1, "wrong": "x" * 200, "last": 2}))
    (tmp_path / "other.txt").write_text("there")

    def loads(folder):
        assert (folder / "other.txt").read_text() == "there"
        if "wrong" in json.loads((folder / NAME).read_text()):
            raise KeyError

    found = preflight_json.culprit(tmp_path, NAME, loads)
    assert found.startswith('config.json: wrong = "xxx') and len(found) < 110

    def never(folder):
        raise RuntimeError

    assert preflight_json.culprit(tmp_path, NAME, never) is None
