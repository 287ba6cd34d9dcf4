"""verl's FSDP engine with fake-quantized weights, and a weight export that writes receipts.

Imported in every worker through `actor_rollout_ref.model.external_lib`. With verl's own engine config (the reference
model, or a run without QUADS) it is the stock engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from quads_ops import compat
from quads_ops.fake_quant import convert
from quads_ops.fake_quant_control import FakeQuantControl
from quads_ops.listing import first_names
from quads_ops.matrix_plan import PlannedParameter, plan_parameters
from quads_ops.receipt import Entry
from quads_ops.settings import QuadsSettings, SettingsError
from quads_ops.targets import Targets
from quads_ops.vllm_method.names import SENSITIVITY_PREFIX
from quads_recipe.engine_config import QuadsFSDPEngineConfig
from quads_recipe.weight_export import ReceiptWriter, stream

_NVFP4_ROLLOUTS = ("w4a16", "w4a4")
_COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class QuadsFSDPEngine(FSDPEngineWithLMHead):
    """FSDPEngineWithLMHead (verl 0.9.1) that trains with NVFP4 fake-quantized weights.

    Attributes:
        settings: the `quads:` block, or None (stock engine).
        fake_quant: control of the converted modules, or None (actor.mode none).
        plan: parameter -> what of it the rollout quantizes; empty where it quantizes nothing.
        last_receipt: matrix -> Entry of the last weight export, on every rank; None until the export is exhausted,
            empty where the rollout holds no NVFP4 weights.
        sensitivities: quantized input -> moving average of the squared gradient of the logprobs, FP32 [K] or [E, K],
            equal on all ranks (quads_recipe.sensitivity); None until it was measured. Exports send it.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.settings = _settings(self.engine_config)
        self.fake_quant: FakeQuantControl | None = None
        self.last_receipt: dict[str, Entry] | None = None
        self.plan: dict[str, PlannedParameter] = {}
        self.sensitivities: dict[str, torch.Tensor] | None = None
        if self.settings is not None:
            self._check_config()
            compat.let_batched_mm_train()  # in arms that convert nothing, too

    def _check_config(self) -> None:
        if self._is_lora:
            raise SettingsError(
                "actor_rollout_ref.model.lora_rank",
                self.model_config.lora_rank,
                "LoRA adapters and quantized base weights do not go together; set it to 0",
            )
        if self._qat_enabled:
            raise SettingsError(
                "actor_rollout_ref.actor.fsdp_config.qat.enable", True, "the quads block replaces it; set it to false"
            )

    def _build_module(self):
        module = super()._build_module()
        settings = self.settings
        if settings is None or (settings.actor.mode == "none" and settings.rollout.mode == "bf16"):
            return module
        targets = Targets(settings.targets, settings.exclude)
        self.plan = plan_parameters(module, targets)
        if settings.actor.mode != "none":
            # Under gradient checkpointing the graph of a layer, and so its fake-quantized weights, live only while the
            # layer's backward runs; recomputing them once more would gain nothing.
            recompute = not self.model_config.enable_gradient_checkpointing
            self.fake_quant = convert(module, targets, settings.actor.mode, recompute=recompute)
            if self.rank == 0:
                names = self.fake_quant.names
                shown = first_names(names, 4)
                print(f"quads: actor {settings.actor.mode}, {len(names)} modules fake-quantized: {shown}")
        return module

    def _build_fsdp_module(self, module):
        with _cpu_patches():
            module = super()._build_fsdp_module(module)
        if self.settings is not None and self._autocast_dtype not in _COMPUTE_DTYPES:
            raise SettingsError(
                "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
                str(self._autocast_dtype).removeprefix("torch."),
                "NVFP4 weights are made from bf16 or fp32; use one of them",
            )
        return module

    def forward_step(self, *args, **kwargs):
        """verl's forward, after which every converted module must have run fake-quantized.

        Raises:
            quads_ops.fake_quant_control.NotFakeQuantized: one did not.
        """
        if self.fake_quant is None:
            return super().forward_step(*args, **kwargs)
        self.fake_quant.start()
        result = super().forward_step(*args, **kwargs)
        self.fake_quant.check()
        return result

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        # On a CPU verl takes the log-softmax in the dtype of the logits; bf16 would round each logprob to 8 bits, more
        # than the mismatch that is measured. On a GPU its cross entropy computes in fp32.
        if get_device_name() == "cpu":
            output.logits = output.logits.float()
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    @contextmanager
    def fake_quant_mode(self, mode: str) -> Iterator[None]:
        """Compute with another actor mode for a while; parameters and RNG are not touched.

        Raises:
            SettingsError: a quantized mode on an actor that was built with mode none.
        """
        if self.fake_quant is None and mode != "none":
            raise SettingsError("quads.actor.mode", mode, "this actor was built with mode none, nothing is converted")
        with nullcontext() if self.fake_quant is None else self.fake_quant.use_mode(mode):
            yield

    def unquantized(self):
        """Context: compute with the full-precision weights."""
        return self.fake_quant_mode("none")

    def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
        """Iterator over (checkpoint name, whole tensor) for the rollout, and None (no adapter).

        Sensitivities, where there are any, come first. Every rank must exhaust it; after that `last_receipt` is there.
        """
        if self.settings is None:
            return super().get_per_tensor_param(layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs)
        self.last_receipt = None
        return self._export(self._sharded_state()), None

    def _sharded_state(self) -> dict[str, torch.Tensor]:
        # FSDP1 gathers inside state_dict() and needs its shards on the device; FSDP2 hands out its shards as they are.
        staged = fsdp_version(self.module) == 1
        if staged:
            load_fsdp_model_to_gpu(self.module)
        params = self.module.state_dict()
        if staged and self._is_offload_param:
            offload_fsdp_model_to_cpu(self.module)
        return convert_weight_keys(params, getattr(self.module, "_fsdp_wrapped_module", self.module))

    def _export(self, params: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        receipts = None
        if self.settings.rollout.mode in _NVFP4_ROLLOUTS:
            receipts = ReceiptWriter(self.plan, dist.get_rank(), dist.get_world_size())
        for name, vector in (self.sensitivities or {}).items():
            yield SENSITIVITY_PREFIX + name, vector
        yield from stream(
            params,
            self.plan,
            receipts,
            dtype=self._autocast_dtype,
            model_type=self.model_config.hf_config.model_type,
            device=get_device_id(),
        )
        self.last_receipt = receipts.collect() if receipts else {}


def _settings(engine_config) -> QuadsSettings | None:
    if not isinstance(engine_config, QuadsFSDPEngineConfig) or engine_config.forward_only:
        return None
    return QuadsSettings.from_dict(engine_config.quads)


def _cpu_patches():
    if get_device_name() != "cpu":
        return nullcontext()
    from quads_recipe.cpu.fsdp import patched

    return patched()
