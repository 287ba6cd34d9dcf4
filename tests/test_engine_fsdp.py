"""The engine through verl's own FSDP1 and FSDP2 paths, on one and on two gloo ranks."""

from __future__ import annotations

import pytest
import support_engine
import support_models
import torch
from safetensors.torch import load_file
from support_engine_jobs import RUNS
from test_fake_quant import rounded
from transformers import AutoModelForCausalLM

from quads_ops import nvfp4, receipt
from quads_ops.vllm_method.names import table_for
from quads_ops.weights import quantize_weight, weight_amax

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FAMILIES = {"qwen3_moe": "num_experts", "qwen2_moe": "num_experts", "mixtral": "num_local_experts", "qwen3": None}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Per number of ranks, a folder with one checkpoint per family (the same in both)."""
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (1, 2)}
    for folder in folders.values():
        for family, experts in FAMILIES.items():
            support_models.save_checkpoint(folder / family, family, **({experts: 3} if experts else {}))
    return folders


@pytest.fixture(scope="module")
def one(folders):
    return support_engine.run_ranks("support_engine_jobs:one_rank", 1, folders[1], timeout_s=500)[0]


@pytest.fixture(scope="module")
def two(folders):
    return support_engine.run_ranks("support_engine_jobs:two_ranks", 2, folders[2], timeout_s=500)


@pytest.fixture(params=list(RUNS))
def run(request, one, two):
    """Name of the run, and the results of: one rank, rank 0 of 2, rank 1 of 2."""
    results = [one["runs"][request.param], *(rank["runs"][request.param] for rank in two)]
    for result in results:
        assert "error" not in result, result["error"]
    return request.param, results


def hf_logprobs(model) -> torch.Tensor:
    """As support_engine.logprobs for the same batch, row by row and without verl."""
    ids = support_engine.batch()["input_ids"]
    rows = []
    with torch.no_grad():
        for row in ids.unbind():
            logits = model(row[None], use_cache=False).logits[0].float()
            rows.append(torch.log_softmax(logits[:-1], -1).gather(1, row[1:, None])[:, 0])
    return torch.cat(rows)


def without_last(logprobs: torch.Tensor) -> torch.Tensor:
    """verl's rows end with a logprob for the token after the sequence, which means nothing."""
    lengths = [len(row) for row in support_engine.batch()["input_ids"].unbind()]
    return torch.cat([part[:-1] for part in logprobs.split(lengths)])


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def receipt_of(weights: dict[str, torch.Tensor], family: str) -> dict[str, receipt.Entry]:
    """From the tensors sent, matrix by matrix, without the exporter's code."""
    canonical = {table_for(family).canonical(name.removesuffix(".weight")): w for name, w in weights.items()}
    canonical = {name: w for name, w in canonical.items() if name.rpartition(".")[2] in QUANTIZED}
    entries = {}
    for name, w in canonical.items():
        parent, _, last = name.rpartition(".")
        group = next((g for g in (QUANTIZED[:3], ("gate_proj", "up_proj")) if last in g), (last,))
        amax = max(weight_amax(canonical[f"{parent}.{member}"]) for member in group)
        packed = quantize_weight(w, nvfp4.global_scale_dec(amax))
        digests = receipt.digest(packed.packed, packed.block_scales)
        entries |= receipt.entries([name], digests, packed.global_scale_dec)
    return entries


def test_every_quantized_module_ran_and_the_unquantized_context_is_undone(run):
    _, results = run
    for result in results:
        assert set(result["runs"].values()) == {1}  # counted anew for each microbatch
        assert torch.equal(result["quantized"], result["again"])
        assert (result["quantized"] - result["unquantized"]).abs().mean() > 0.02


def test_logprobs_are_those_of_rounded_weights(run, folders):
    name, results = run
    family, arguments = RUNS[name]
    model = load(folders[1] / family)
    exact, plain = hf_logprobs(rounded(model)), hf_logprobs(model)
    if arguments.get("param_dtype") == "bf16":
        source = {n: p.data.bfloat16().float() for n, p in model.named_parameters()}
        model.load_state_dict(source, strict=False)
        exact, plain = hf_logprobs(rounded(model, torch.bfloat16)), hf_logprobs(model)
    tolerance = 0.1 if arguments.get("param_dtype") == "bf16" else 1e-5
    for result in results:
        assert (without_last(result["quantized"]) - exact).abs().max() < tolerance
        assert (without_last(result["unquantized"]) - plain).abs().max() < tolerance
    assert (exact - plain).abs().max() > 2 * tolerance


def test_the_gradient_is_that_of_rounded_weights(run, folders):
    name, results = run
    family, arguments = RUNS[name]
    if arguments.get("param_dtype") == "bf16":
        tolerance = 0.03
    else:
        tolerance = 1e-4
    model = rounded(load(folders[1] / family), torch.bfloat16 if tolerance > 0.01 else None)
    ids = support_engine.batch()["input_ids"].unbind()
    rolled = torch.roll(torch.cat(list(ids)), -1).split([len(row) for row in ids])
    for micro in (slice(0, 2), slice(2, 4)):
        losses = []
        for row, labels in zip(ids[micro], [r for r in rolled][micro], strict=True):
            logits = model(row[None], use_cache=False).logits[0]
            losses.append(torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0])
        # verl rolls each microbatch for itself, so its last label is the first token of the microbatch
        last = torch.log_softmax(logits[-1], -1)[ids[micro][0][0]]
        losses[-1] = torch.cat([losses[-1][:-1], last[None]])
        (-torch.cat(losses).mean()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for result in results:
        assert result["grad_norm"] == pytest.approx(norm.item(), rel=tolerance)


def test_what_is_sent_is_the_checkpoint_in_compute_dtype(run, folders):
    name, results = run
    family, arguments = RUNS[name]
    dtype = torch.bfloat16 if arguments.get("param_dtype") == "bf16" else torch.float32
    checkpoint = load_file(folders[1] / family / "model.safetensors")
    for result in results:
        assert result["sent"].keys() == checkpoint.keys()
        for key, tensor in result["sent"].items():
            module = table_for(family).canonical(key.removesuffix(".weight"))
            quantized = key.endswith(".weight") and module.rpartition(".")[2] in QUANTIZED
            assert tensor.dtype == (dtype if quantized else torch.float32), key
            assert torch.equal(tensor, checkpoint[key].to(tensor.dtype)), key


def test_receipts_are_the_same_on_every_rank_and_for_every_sharding(run):
    name, results = run
    family = RUNS[name][0]
    expected = receipt_of(results[0]["sent"], family)
    for result in results:
        assert result["receipt_before_export"] is None
        receipt.compare(expected, result["receipt"])


def test_after_a_step_everything_follows_the_new_weights(run, folders):
    """Scales that lag behind the weights would show here."""
    name, results = run
    family, arguments = RUNS[name]
    for result in results:
        expected = receipt_of(result["sent_after_step"], family)
        receipt.compare(expected, result["receipt_after_step"])
        changed = [m for m in expected if expected[m] != result["receipt"][m]]
        assert len(changed) == len(expected)
    if arguments.get("param_dtype") != "bf16":
        model = load(folders[1] / family)
        state = {table_for(family).canonical(k): v for k, v in results[0]["sent_after_step"].items()}
        for key, parameter in model.named_parameters():
            parameter.data = state[key] if key in state else _fused(state, key, parameter)
        got = without_last(results[0]["quantized_after_step"])
        assert (got - hf_logprobs(rounded(model))).abs().max() < 1e-5


def _fused(state, key: str, parameter) -> torch.Tensor:
    prefix, _, last = key.rpartition(".")
    projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    experts = range(parameter.shape[0])
    return torch.stack([torch.cat([state[f"{prefix}.{e}.{p}.weight"] for p in projections]) for e in experts])


def test_checkpoint_keys_are_those_of_the_plain_model(run, folders):
    name, results = run
    family = RUNS[name][0]
    for result in results:
        assert result["keys"] == list(load(folders[1] / family).state_dict())


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_resumed_run_goes_on_with_identical_weights(one, two, strategy):
    for rank in (one, *two):
        result = rank["resume"][strategy]
        assert "error" not in result, result["error"]
        assert result["loaded"] == result["saved"]
        assert result["resumed"] == result["next"] != result["saved"]
        assert result["equal"]
        if strategy == "fsdp":
            continue
        exported = load_file(f"{result['checkpoint']}/huggingface/model.safetensors")
        assert exported.keys() == result["saved_weights"].keys()
        for key, tensor in exported.items():
            assert torch.equal(tensor.bfloat16(), result["saved_weights"][key].bfloat16())


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_without_the_quads_block_the_engine_is_verls(one, folders, strategy):
    result = one["stock"][strategy]
    assert "error" not in result, result["error"]
    plain = hf_logprobs(load(folders[1] / "qwen3_moe"))
    assert result["same_stream"]
    assert result["fake_quant"] is result["reference_fake_quant"] is result["receipt"] is None
    for which in ("logprobs", "reference"):
        assert (without_last(result[which]) - plain).abs().max() < 1e-5


@pytest.mark.parametrize(
    "arm,converted,receipts",
    [("bf16", None, 0), ("fp8", None, 0), ("naive", None, 26), ("symmetric", ("w4a4", 10), 26)],
)
def test_arms(one, arm, converted, receipts):
    result = one["arms"][arm]
    assert "error" not in result, result["error"]
    assert result["converted"] == converted
    assert len(result["receipt"]) == receipts  # two layers of 4 linears and 3 experts with 3 matrices
    plain, quantized = (one["runs"]["fsdp2-fp32"][k] for k in ("unquantized", "quantized"))
    if converted is None:
        assert torch.equal(result["logprobs"], plain)
        assert "built with mode none" in result["mode_w4a16"]["error"]
    else:
        assert (result["logprobs"] - quantized).abs().mean() > 0.01
    assert result["mode_none"] is None


@pytest.mark.parametrize("arm", ["bf16", "quads"])
def test_batched_mm_trains_in_arms_that_convert_and_in_those_that_do_not(one, arm):
    result = one["batched"][arm]
    assert "error" not in result, result["error"]
    norms = result["grad_norms"]
    assert norms["batched_mm"] == pytest.approx(norms["grouped_mm"], rel=1e-4)


@pytest.mark.parametrize(
    "case,message",
    [
        ("lora", "SettingsError: actor_rollout_ref.model.lora_rank = 4"),
        ("fp16", "SettingsError: actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype = 'float16'"),
        ("arm", "SettingsError: quads.arm = 'nvfp4'"),
        ("pattern", "SettingsError: quads.targets = 'model.layers.7.mlp.experts'"),
        ("wrapped_apart", "RuntimeError: the weight of model.layers.0.self_attn.k_proj is not gathered while"),
        ("bypassed", "NotFakeQuantized: 1 of 10 converted modules"),
    ],
)
def test_wrong_setups_end_with_one_clear_error(one, case, message):
    assert one["refused"][case].startswith(message)


def test_registered_for_cpu_and_nvidia_and_verls_own_stays(one):
    assert one["registry"] == {"fsdp": (True, True, True), "fsdp2": (True, True, True)}


@pytest.mark.parametrize("strategy,message", [("fsdp", "sync_module_states"), ("fsdp2", "pin")])
def test_the_cpu_patches_are_still_needed(one, strategy, message):
    assert message in (one["unpatched"][strategy]["error"] or "no error: remove the patch")
