"""Names of matrices: in memory (transformers 5), in checkpoints (what vLLM loads), and in receipts.

transformers 5 keeps the experts of a layer in two 3-D parameters, `...mlp.experts.gate_up_proj` and
`...mlp.experts.down_proj`; checkpoints have a 2-D tensor per expert. A *matrix* is named alike for every family:
`model.layers.0.mlp.experts.3.gate_proj`.
"""

from __future__ import annotations

import re

# Fused-expert classes of transformers 5 with gate_up_proj [E, 2I, H] (gate first) and down_proj [E, H, I], no biases.
# A class is listed once its checkpoint names and its rollout were tested.
FUSED_EXPERT_CLASSES = ("Qwen2MoeExperts", "Qwen3MoeExperts", "MixtralExperts")

# Linears of one parent module that the rollout fuses into one matrix, and that so share one global scale.
FUSED_LINEARS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# model_type -> (name in memory, name in the checkpoint), for the families whose checkpoints differ.
_CHECKPOINT_PARTS = {
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".down_proj.", ".w2."),
        (".up_proj.", ".w3."),
    )
}
_MIXTRAL_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w([123])$")
_MIXTRAL_PROJECTION = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}


def checkpoint_name(name: str, model_type: str) -> str:
    """Checkpoint name of a tensor in memory whose experts are unfused already.

    `model.layers.0.mlp.experts.3.gate_proj.weight` is itself for the Qwen families and
    `model.layers.0.block_sparse_moe.experts.3.w1.weight` for Mixtral.
    """
    for in_memory, in_checkpoint in _CHECKPOINT_PARTS.get(model_type, ()):
        name = name.replace(in_memory, in_checkpoint)
    return name


def matrix_name(checkpoint_tensor: str) -> str:
    """The matrix a checkpoint tensor (`....weight`) holds, named as receipts name it, whatever the family."""
    name = checkpoint_tensor.removesuffix(".weight")
    return _MIXTRAL_EXPERT.sub(lambda m: f".mlp.experts.{m[1]}.{_MIXTRAL_PROJECTION[m[2]]}", name)


def expert_matrix(experts: str, expert: int, projection: str) -> str:
    """`model.layers.0.mlp.experts`, 3, `gate_proj` -> the matrix `model.layers.0.mlp.experts.3.gate_proj`."""
    return f"{experts}.{expert}.{projection}"
