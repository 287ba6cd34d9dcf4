"""Which modules are quantized: one matcher, used by the trainer, by the rollout and by the check before both.

A module is named as transformers 5 names it in memory: `model.layers.0.self_attn.q_proj` for a linear,
`model.layers.0.mlp.experts` for the fused experts of one layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quads_ops.settings import SettingsError

# Last components that are never quantized: their outputs choose experts or tokens, and their sizes save nothing.
_NEVER = {"lm_head", "embed_out", "gate", "router", "shared_expert_gate", "shared_experts_gate", "score", "classifier"}
_NEVER_ANYWHERE = re.compile(r"(^|\.)(router|embed\w*|\w*embeddings?|wte|wpe|lm_head)(\.|$)")


def never_quantized(module: str) -> bool:
    """True for embeddings, the head, router gates and shared-expert gates, however they are spelled."""
    return module.rsplit(".", 1)[-1] in _NEVER or _NEVER_ANYWHERE.search(module) is not None


def is_expert(module: str) -> bool:
    """True for the routed experts of a layer (`...mlp.experts`) and what is inside them; not for shared experts."""
    return "experts" in module.split(".")


def _compile(name: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern[3:]) if pattern.startswith("re:") else re.compile(re.escape(pattern))
    except re.error as error:
        raise SettingsError(name, pattern, f"is not a regular expression: {error}") from None


@dataclass(frozen=True)
class Plan:
    """The outcome of matching `Targets` against a model's modules, in the model's order."""

    quantized: tuple[str, ...]
    kept: dict[str, str]
    """Module left in full precision -> why."""
    matches: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern -> the modules it matched."""


class Targets:
    """Decides per module name.

    Args:
        targets: `all_linear`, `experts`, or a list of patterns (an exact module name, or `re:` and a regular
            expression that must match the whole name).
        exclude: patterns of modules to leave alone.
    """

    def __init__(self, targets: str | Sequence[str], exclude: Sequence[str] = ()):
        self._set = targets if isinstance(targets, str) else None
        self._wanted = {} if self._set else {p: _compile("quads.targets", p) for p in targets}
        self._excluded = {p: _compile("quads.exclude", p) for p in exclude}

    def wants(self, module: str) -> bool:
        """True if `module` is to be quantized."""
        return self.reason_kept(module) is None

    def reason_kept(self, module: str) -> str | None:
        """Why `module` stays in full precision, or None if it is to be quantized."""
        if never_quantized(module):
            return "never quantized"
        for pattern, regex in self._excluded.items():
            if regex.fullmatch(module):
                return f"excluded by {pattern!r}"
        if self._set == "experts" and not is_expert(module):
            return "not an expert"
        if self._set is None and not any(regex.fullmatch(module) for regex in self._wanted.values()):
            return "matched by no target pattern"
        return None

    def match(self, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Pattern -> the modules that it matches, in the model's order.

        Raises:
            SettingsError: a pattern matches none of them, or only what is never quantized.
        """
        modules = tuple(modules)
        matches: dict[str, tuple[str, ...]] = {}
        for name, patterns in (("quads.targets", self._wanted), ("quads.exclude", self._excluded)):
            for pattern, regex in patterns.items():
                matches[pattern] = tuple(m for m in modules if regex.fullmatch(m))
                if not matches[pattern]:
                    raise SettingsError(name, pattern, _no_match(modules))
                blocked = [m for m in matches[pattern] if never_quantized(m)]
                if name == "quads.targets" and len(blocked) == len(matches[pattern]):
                    raise SettingsError(name, pattern, f"matches only modules that are never quantized: {blocked[0]}")
        return matches

    def plan(self, modules: Iterable[str]) -> Plan:
        """Match all quantizable modules of a model.

        Raises:
            SettingsError: what `match` refuses, or nothing is left to quantize.
        """
        modules = tuple(modules)
        matches = self.match(modules)
        kept = {m: reason for m in modules if (reason := self.reason_kept(m)) is not None}
        quantized = tuple(m for m in modules if m not in kept)
        if not quantized:
            raise self._nothing_left(kept.values())
        return Plan(quantized=quantized, kept=kept, matches=matches)

    def setting_of(self, module: str) -> tuple[str, str]:
        """Which setting keeps `module` in full precision, and the value in it: for messages about a kept module."""
        for pattern, regex in self._excluded.items():
            if regex.fullmatch(module):
                return "quads.exclude", pattern
        return "quads.targets", self._set or ", ".join(self._wanted)

    def _nothing_left(self, reasons: Iterable[str]) -> SettingsError:
        if any(reason.startswith("excluded") for reason in reasons):
            return SettingsError(
                "quads.exclude",
                list(self._excluded),
                "takes out every module of quads.targets, and nothing is left to quantize; narrow it, or use arm bf16",
            )
        return SettingsError(
            "quads.targets",
            self._set or list(self._wanted),
            "nothing is left to quantize; the model has no such module",
        )


def _no_match(modules: Sequence[str]) -> str:
    examples = ", ".join(modules[:2] + tuple(m for m in modules if is_expert(m))[:1])
    return f"matches no module; a name must match whole (or write 're:...'); the model has {examples}, ..."
