"""The first load of a checkpoint into vLLM: what is missing, doubled or of another shape is named; complete ones pass.

Models are built and loaded by vLLM's own loader, without the rest of an engine.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import support_vllm as support
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from quads_ops.vllm_method import checkpoint_map, compat_vllm, first_load, names  # noqa: E402
from quads_ops.vllm_method.checkpoint_map import Wanted  # noqa: E402
from quads_ops.vllm_method.first_load import CheckedStream  # noqa: E402

pytestmark = [pytest.mark.integration, support.vllm_cpu()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoint of a family, written once. Qwen2-MoE has biases, a shared expert and a head of its own."""
    written: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in written:
            written[family] = tmp_path_factory.mktemp(family)
            support.make_model(written[family], family, num_hidden_layers=1, tie_word_embeddings=family == "mixtral")
        return written[family]

    return folder


@pytest.fixture(scope="module")
def load():
    """load(folder, mode, **arguments of vLLM's engine) -> the model."""
    with support.model_loader() as loader:
        yield lambda folder, mode, **kwargs: loader(folder, {"mode": mode}, **kwargs)[0]


def changed(folder: Path, target: Path, change) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    shutil.copytree(folder, target)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


MISSING = [
    ("qwen2_moe", "w4a16", "model.layers.0.self_attn.q_proj.weight"),
    ("qwen2_moe", "w4a16", "model.layers.0.self_attn.k_proj.bias"),
    ("qwen2_moe", "w4a16", "model.layers.0.self_attn.o_proj.weight"),
    ("qwen2_moe", "w4a16", "model.layers.0.mlp.experts.2.down_proj.weight"),
    ("qwen2_moe", "w4a16", "model.layers.0.mlp.shared_expert.up_proj.weight"),
    ("qwen2_moe", "w4a16", "model.layers.0.mlp.gate.weight"),
    ("qwen2_moe", "w4a16", "model.layers.0.input_layernorm.weight"),
    ("qwen2_moe", "w4a16", "model.embed_tokens.weight"),
    ("qwen2_moe", "w4a16", "lm_head.weight"),
    ("qwen2_moe", "bf16", "model.layers.0.self_attn.v_proj.weight"),
    ("qwen2_moe", "bf16", "model.layers.0.mlp.experts.2.up_proj.weight"),
    ("mixtral", "w4a4", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
]


@pytest.mark.parametrize(("family", "mode", "name"), MISSING)
def test_a_missing_tensor_is_named(folders, load, tmp_path, family, mode, name):
    folder = changed(folders(family), tmp_path / "checkpoint", lambda weights: weights.pop(name))
    canonical = names.table_for(family).canonical(name)
    with pytest.raises(ValueError, match=rf"the checkpoint lacks 1 of \d+ tensors: {canonical}\. Save the whole model"):
        load(folder, mode)


@pytest.mark.parametrize(("family", "mode"), [("qwen2_moe", "w4a16"), ("qwen2_moe", "bf16"), ("mixtral", "w4a4")])
def test_a_complete_checkpoint_passes(folders, load, family, mode, monkeypatch):
    warnings = []
    monkeypatch.setattr(first_load.logger, "warning", lambda *args: warnings.append(args))
    model = load(folders(family), mode)
    assert "load_weights" not in vars(model), "checked once"
    assert first_load._looking is None
    assert warnings == []


def test_a_tied_head_may_be_in_the_checkpoint_too(folders, load, tmp_path):
    def add_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    load(changed(folders("mixtral"), tmp_path / "checkpoint", add_head), "w4a4")


def test_no_weights_are_needed_for_load_format_dummy(folders, load, tmp_path):
    shutil.copy(folders("mixtral") / "config.json", tmp_path)
    assert "load_weights" not in vars(load(tmp_path, "w4a4", load_format="dummy"))


def test_a_wrong_shape_is_named(folders, load, tmp_path):
    def halve(weights):
        name = "model.layers.0.self_attn.k_proj.weight"
        weights[name] = weights[name][:16].clone()

    folder = changed(folders("qwen2_moe"), tmp_path / "checkpoint", halve)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.k_proj\.weight has shape \(16, 64\) .* needs \(32, 64\)"
    ):
        load(folder, "w4a16")


def test_a_quantized_tensor_in_two_files_is_named(folders, load, tmp_path):
    folder = shutil.copytree(folders("qwen2_moe"), tmp_path / "checkpoint")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name]}, folder / "extra.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.self_attn\.k_proj\.weight twice\. Remove the file"):
        load(folder, "w4a16")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder, "w4a16")


class Language(torch.nn.Module):
    """Stands for a model of vLLM; `table` is what its first quantized layer finds."""

    def __init__(self, load_format: str):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=False)
        config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format), model_config=None)
        first_load.check_when_built(config, names.NameTable())
        self.norm = torch.nn.LayerNorm(4)
        self.loads = 0

    def load_weights(self, weights):
        self.loads += 1
        return {name for name, _ in weights}


class Pictures(torch.nn.Module):
    """Stands for a model that has another as its language model, and may load it piece by piece."""

    def __init__(self, load_format: str):
        super().__init__()
        self.language_model = Language(load_format)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.language_model.load_weights([(name, tensor)])


@pytest.mark.parametrize("cls", [Language, Pictures])
def test_the_outermost_model_is_checked_once(cls, monkeypatch):
    monkeypatch.setattr(first_load.compat_vllm, "get_model_architecture", lambda _: (Language, "Language"))
    dummy, model = cls("dummy"), cls("auto")
    prefix = "" if cls is Language else "language_model."
    weights = [(f"{prefix}norm.{kind}", torch.ones(4)) for kind in ("weight", "bias")]
    with pytest.raises(ValueError, match=rf"lacks 1 of 2 tensors: {prefix}norm\.bias\."):
        model.load_weights(weights[:1])
    model.load_weights(weights[:1])  # from here on it is the caller's business
    dummy.load_weights(weights[:1])
    cls("auto").load_weights(weights)
    assert first_load._looking is None


def stream(sent: list[str], loaded: set[str] | None, wanted: dict[str, Wanted]) -> CheckedStream:
    checked = CheckedStream(wanted, names.NameTable(), tied=False)
    checked.load(lambda weights: [name for name, _ in weights], [(name, torch.zeros(1)) for name in sent])
    checked.check_complete(loaded)
    return checked


def wanted(**parameters: tuple[str, ...]) -> dict[str, Wanted]:
    """vLLM's parameter, with __ for dots -> the checkpoint's names of its parts."""
    found = {}
    for parameter, parts in parameters.items():
        path = parameter.replace("__", ".")
        for part in parts:
            found[part] = Wanted(None, torch.float32, path, path.rpartition(".")[0])
    return found


QKV = wanted(attn__qkv_proj__weight=("attn.q_proj.weight", "attn.k_proj.weight"), norm__weight=("norm.weight",))


@pytest.mark.parametrize(
    ("sent", "loaded"),
    [
        (["attn.qkv_proj.weight", "norm.weight"], None),  # joined in the checkpoint, as in vLLM
        (["attn.qkv_proj.weight", "norm.weight"], {"attn.qkv_proj.weight", "norm.weight"}),
    ],
)
def test_joined_matrices_count_for_their_parts(sent, loaded, monkeypatch):
    monkeypatch.setattr(first_load.logger, "warning", lambda *args: pytest.fail(str(args)))
    stream(sent, loaded, QKV)


def test_names_that_are_not_known_are_a_warning(monkeypatch):
    """vLLM may know them, and then a model loads that loaded before."""
    said = []
    monkeypatch.setattr(first_load.logger, "warning", lambda text, *args: said.append(text % args))
    stream(["attn.query.weight", "attn.key.weight", "norm.weight"], {"attn.qkv_proj.weight", "norm.weight"}, QKV)
    assert len(said) == 1 and said[0].endswith("complete in attn.k_proj.weight, attn.q_proj.weight")


@pytest.mark.parametrize(
    ("sent", "loaded", "lacks"),
    [
        (["attn.query.weight"], {"attn.qkv_proj.weight"}, "1 of 3 tensors: norm.weight"),  # vLLM did not load it either
        (["attn.q_proj.weight", "other"], {"attn.qkv_proj.weight"}, "2 of 3 tensors: attn.k_proj.weight, norm.weight"),
        (["attn.q_proj.weight", "attn.k_proj.weight"], None, "1 of 3 tensors: norm.weight"),
        ([], set(), "3 of 3 tensors"),
    ],
)
def test_what_is_missing_beside_unknown_names(sent, loaded, lacks):
    with pytest.raises(ValueError, match=f"the checkpoint lacks {lacks}"):
        stream(sent, loaded, QKV)


def test_all_experts_in_one_tensor():
    experts = wanted(
        m__experts__w13_weight=("m.experts.0.gate_proj.weight", "m.experts.0.up_proj.weight"),
        m__experts__w2_weight=("m.experts.0.down_proj.weight",),
    )
    stream(["m.experts.gate_up_proj", "m.experts.down_proj"], None, experts)
    with pytest.raises(ValueError, match=r"lacks 1 of 3 tensors: m\.experts\.0\.down_proj\.weight"):
        stream(["m.experts.gate_up_proj", "m.experts.0.up_proj.weight"], {"m.experts.w13_weight"}, experts)


def test_experts_of_another_worker_need_not_come():
    """vLLM can leave them unread under expert parallelism."""
    elsewhere = {"m.experts.1.down_proj.weight": Wanted(None, torch.float32, "p", "m.experts", elsewhere=True)}
    stream([], None, elsewhere)


def test_ignorable_names():
    assert checkpoint_map.ignorable("lm_head.weight", tied=True)
    assert not checkpoint_map.ignorable("lm_head.weight", tied=False)


def test_a_bias_that_router_and_experts_share_is_wanted_once(folders, load):
    """Of models like GLM 4 MoE, vLLM makes the router's e_score_correction_bias a parameter of the experts too."""
    model = load(folders("qwen2_moe"), "w4a16")
    gate = model.model.layers[0].mlp.gate
    experts = next(m for m in model.modules() if isinstance(m, checkpoint_map.RoutedExperts))
    gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    experts.e_score_correction_bias = gate.e_score_correction_bias
    compat_vllm.initialize_layerwise_reload(model)
    wanted = checkpoint_map.wanted_weights(model, names.table_for("qwen2_moe"))
    compat_vllm.abort_layerwise_reload(model)
    biases = [name for name in wanted if "e_score" in name]
    assert biases == ["model.layers.0.mlp.gate.e_score_correction_bias"]
