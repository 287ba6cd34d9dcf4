"""Where the package's own data lies, in a checkout as well as in an installed package; folders that options name."""

import argparse
import os
import re
from pathlib import Path

_HERE = Path(__file__).resolve().parent
POLICIES = ("natural", "outlier")


def configs_dir() -> Path:
    """The folder of hydra configs, for `--config-path`. Raises FileNotFoundError if the installation lacks it."""
    places = (_HERE / "configs", _HERE.parents[1] / "configs")  # installed as package data; a checkout
    for place in places:
        if (place / "quads_demo.yaml").is_file():
            return place
    raise FileNotFoundError(f"no quads_demo.yaml in {' or '.join(map(str, places))}; install the package again")


def policy_dir(policy: str) -> Path:
    """The checkpoint folder of a shipped policy (natural, outlier) or the folder that `policy` names.

    Raises FileNotFoundError if there is no config.json in it.
    """
    folder = _HERE / "policies" / policy if policy in POLICIES else Path(policy).expanduser().resolve()
    if not (folder / "config.json").is_file():
        choices = ", ".join(POLICIES)
        raise FileNotFoundError(
            f"policy {policy!r}: {folder} has no config.json; use {choices} or a Hugging Face checkpoint folder"
        )
    return folder


def given_folder(text: str | Path) -> Path:
    """The folder that an option names, which need not be there; for argparse's `type=` as well.

    Raises argparse.ArgumentTypeError: it is empty, which Path would take for the current folder, is a file, or begins
    with a `~` that stands for nobody's folder.
    """
    if not str(text).strip():
        raise argparse.ArgumentTypeError(f"{str(text)!r} names no folder; give one")
    try:
        folder = Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text}: there is no such user; write out what ~ stands for") from None
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{folder} is a file; give a folder")
    return folder


def hydra_value(path: Path | str) -> str:
    """A path as the value of a hydra override. Quoted, since hydra's grammar gives a meaning to commas and brackets."""
    text = str(path)
    if re.fullmatch(r"[\w./:%+-]+", text, re.ASCII):
        return text
    return "'" + text.replace("'", r"\'") + "'"
