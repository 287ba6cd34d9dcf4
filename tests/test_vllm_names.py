"""Names of matrices on both sides, and which part of them a tensor parallel worker holds."""

from types import SimpleNamespace

import pytest
import torch

from quads_ops import nvfp4, receipt
from quads_ops.vllm_method import names, shards
from quads_ops.weights import quantize_weight, weight_amax

MIXTRAL = names.table_for("mixtral")


@pytest.mark.parametrize(
    ("canonical", "loader"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.block_sparse_moe.experts.0.w3.weight"),
        ("model.layers.11.mlp.experts.7.down_proj.weight", "model.layers.11.block_sparse_moe.experts.7.w2.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
        ("model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_mixtral_both_directions(canonical, loader):
    assert MIXTRAL.canonical(loader) == canonical
    assert MIXTRAL.loader(canonical) == loader
    assert MIXTRAL.canonical(canonical) == canonical
    assert MIXTRAL.loader(loader) == loader


def test_other_models_keep_their_names():
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    assert names.table_for("qwen3_moe").canonical(name) == names.table_for("qwen3_moe").loader(name) == name


def test_members_of_joined_layers():
    assert names.members("m.self_attn.qkv_proj", 3) == tuple(f"m.self_attn.{x}_proj" for x in "qkv")
    assert names.members("m.mlp.gate_up_proj", 2) == ("m.mlp.gate_proj", "m.mlp.up_proj")
    assert names.members("m.self_attn.o_proj", 1) == ("m.self_attn.o_proj",)
    with pytest.raises(ValueError, match="m.attn.fused_qkv_a_proj joins 2 matrices"):
        names.members("m.attn.fused_qkv_a_proj", 2)


def worker_layer(rank: int, parallel: int, heads: int, kv_heads: int, head_size: int) -> tuple[SimpleNamespace, list]:
    """The attributes of vLLM's QKVParallelLinear that shards are computed from."""
    copies = max(1, parallel // kv_heads)
    kv = max(1, kv_heads // parallel)
    sizes = [heads // parallel * head_size, kv * head_size, kv * head_size]
    return SimpleNamespace(tp_rank=rank, tp_size=parallel, num_kv_head_replicas=copies), sizes


@pytest.mark.parametrize(("parallel", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1)])
def test_receipts_of_qkv_do_not_depend_on_the_sharding(parallel, kv_heads):
    heads, head_size, k = 4, 8, 32
    matrices = {x: torch.randn(n * head_size, k) for x, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    g = nvfp4.global_scale_dec(weight_amax(torch.cat(list(matrices.values()))))
    packed = {name: quantize_weight(w, g) for name, w in matrices.items()}
    whole = {
        name: receipt.entries([name], receipt.digest(p.packed, p.block_scales), g)[name] for name, p in packed.items()
    }
    parts: dict[str, list] = {name: [] for name in matrices}
    for rank in range(parallel):
        layer, sizes = worker_layer(rank, parallel, heads, kv_heads, head_size)
        output_size = sum(sizes) * parallel
        for shard in shards.linear_shards(layer, list("qkv"), sizes, k, k, output_size, rank):
            if not shard.counted:
                continue
            rows = slice(shard.row0, shard.row0 + shard.rows.stop - shard.rows.start)
            p = packed[shard.name]
            digest = receipt.digest(p.packed[rows], p.block_scales[rows], row0=shard.row0, full_shape=shard.full_shape)
            parts[shard.name].append(receipt.entries([shard.name], digest, g)[shard.name])
    assert {name: receipt.combine(entries) for name, entries in parts.items()} == whole


def test_row_parallel_and_replicated_layers():
    layer = SimpleNamespace(tp_rank=1, tp_size=2)
    (row,) = shards.linear_shards(layer, ["o"], [64], 32, 64, 64, 1)
    assert (row.row0, row.col0, row.full_shape, row.counted, row.whole) == (0, 32, (64, 64), True, False)
    (copy,) = shards.linear_shards(layer, ["x"], [64], 64, 64, 64, 1)
    assert (copy.row0, copy.col0, copy.full_shape, copy.counted, copy.whole) == (0, 0, (64, 64), False, True)


def test_experts_of_a_worker():
    gate_up, down = shards.expert_shards("m.mlp.experts", [4, 5], 64, 16, rank=1, parallel=2)
    assert [s.name for s in gate_up] == [f"m.mlp.experts.{e}.{x}_proj" for e in (4, 5) for x in ("gate", "up")]
    assert [(s.expert, s.row0, s.full_shape) for s in gate_up[2:]] == [(1, 16, (32, 64))] * 2
    assert [(s.col0, s.full_shape, s.whole) for s in down] == [(16, (64, 32), False)] * 2


def test_experts_of_other_workers_are_not_waited_for():
    checkpoint_map = pytest.importorskip("quads_ops.vllm_method.checkpoint_map")
    module = SimpleNamespace(layer_name="model.layers.0.block_sparse_moe.experts", expert_map=torch.tensor([-1, 0, 1]))
    matrices = list(checkpoint_map._matrices_elsewhere(module, MIXTRAL))
    assert matrices == [f"model.layers.0.mlp.experts.0.{x}_proj.weight" for x in ("gate", "up", "down")]
    module.expert_map = None
    assert list(checkpoint_map._matrices_elsewhere(module, MIXTRAL)) == []


def test_k_must_consist_of_whole_blocks():
    shards.check_k("m", 48, 2)
    with pytest.raises(ValueError, match=r"m\.o_proj has K = 24 on each worker with tensor parallel size 2"):
        shards.check_k("m.o_proj", 24, 2)
