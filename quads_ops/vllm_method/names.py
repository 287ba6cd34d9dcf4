"""Names of weights: what transformers 5 calls them in memory (canonical), and what vLLM's loaders and layers call them.

Patterns, receipts and messages use canonical names. For most models both are the same; a model whose checkpoint kept
other names for its experts has a row in `_TABLES`. vLLM also joins matrices: `FUSED` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last component of a vLLM linear layer -> the matrices it joins, in the order of its rows."""

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class NameTable:
    """Translates names of modules and of weights in both directions.

    moe_block: what vLLM and the checkpoint call the block that holds router and experts; canonical it is `mlp`.
    projections: their name of an expert's projection -> the canonical one.
    """

    moe_block: str | None = None
    projections: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """From a vLLM module or checkpoint name; a canonical name stays as it is."""
        if self.moe_block is None:
            return name
        return self._rename(name, self.moe_block, "mlp", dict(self.projections))

    def loader(self, name: str) -> str:
        """From a canonical name to the one that the model's `load_weights` in vLLM takes."""
        if self.moe_block is None:
            return name
        return self._rename(name, "mlp", self.moe_block, {new: old for old, new in self.projections})

    @staticmethod
    def _rename(name: str, block: str, new_block: str, projections: dict[str, str]) -> str:
        head, dot, tail = name.partition(f".{block}.")
        if not dot:
            return name
        expert = re.fullmatch(r"(experts\.\d+\.)(\w+)(.*)", tail)
        if expert:
            tail = expert[1] + projections.get(expert[2], expert[2]) + expert[3]
        return f"{head}.{new_block}.{tail}"


_MIXTRAL = NameTable("block_sparse_moe", (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")))
_TABLES: dict[str, NameTable] = {"mixtral": _MIXTRAL}


def table_for(model_type: str) -> NameTable:
    """The name table of a model, by the `model_type` of its Hugging Face configuration."""
    return _TABLES.get(model_type, NameTable())


def is_known(module: str, parts: int) -> bool:
    """True unless `module` is a layer of several matrices with a name that is not in `FUSED`."""
    return parts == 1 or module.rpartition(".")[2] in FUSED


def members(module: str, parts: int) -> tuple[str, ...]:
    """Canonical names of the matrices in a vLLM linear layer that joins `parts` of them.

    Raises:
        ValueError: a joined layer whose matrices are not known here.
    """
    head, _, last = module.rpartition(".")
    if last in FUSED:
        return tuple(f"{head}.{member}" for member in FUSED[last])
    if not is_known(module, parts):
        raise ValueError(
            f"quads_nvfp4: {module} joins {parts} matrices under a name that is not known "
            f"(known: {', '.join(FUSED)}). Leave this model's layers of this kind out with quads.exclude, or add the "
            "name to quads_ops/vllm_method/names.py"
        )
    return (module,)


SENSITIVITY_PREFIX = "quads.sensitivity:"
"""Before the name of a quantized input, where the weight stream has its squared gradients."""

_EXPERT_INPUTS = {"w13": "gate_up_proj", "w2": "down_proj"}


def input_name(module: str, stem: str) -> str:
    """Name of a quantized input: of a linear layer that of the layer, `...mlp.experts.gate_up_proj` for experts.

    stem: of the layer's weight in vLLM (`w13`, `w2` for experts).
    """
    return f"{module}.{_EXPERT_INPUTS[stem]}" if stem in _EXPERT_INPUTS else module


def expert_matrices(module: str, expert: int) -> tuple[str, str, str]:
    """Names of gate, up and down of one expert; `module` is the layer's experts, `...mlp.experts`."""
    return tuple(f"{module}.{expert}.{projection}" for projection in EXPERT_PROJECTIONS)
