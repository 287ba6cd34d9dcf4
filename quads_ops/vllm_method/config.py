"""vLLM's quantization configuration `quads_nvfp4`: options, and which method each layer gets."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from quads_ops import compat, dispatch
from quads_ops.matrix_plan import quantizable_modules
from quads_ops.settings import QuadsSettings, SettingsError
from quads_ops.targets import Targets
from quads_ops.vllm_method import first_load, names, projection
from quads_ops.vllm_method.compat_vllm import RoutedExperts
from quads_ops.vllm_method.linear import QuadsLinearMethod
from quads_ops.vllm_method.moe import QuadsMoEMethod

NAME = "quads_nvfp4"
_OPTIONS = ("targets", "exclude", "group_size", "mode", "residual")
_TOP = ("targets", "exclude", "group_size")

logger = init_logger(f"vllm.{__name__}")


@register_quantization_config(NAME)
class QuadsNvfp4Config(QuantizationConfig):
    """Options, all optional (`hf_overrides={"quantization_config": {"quant_method": "quads_nvfp4", ...}}`):

    targets, exclude, group_size, mode, residual: as `targets`, `exclude`, `group_size`, `rollout.mode` and
    `rollout.residual` of the `quads` block (quads_ops.settings). Without any: arm `quads`.

    Raises:
        SettingsError: an unknown option or a wrong value.
        UnsupportedVersion: a vLLM that was never tried.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        super().__init__()
        compat.require_supported("vllm")
        self.settings = _settings(options or {})
        self.rollout = self.settings.rollout
        self.targets = Targets(self.settings.targets, self.settings.exclude)
        self._table: names.NameTable | None = None

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # nothing is read from the model folder: weights arrive unquantized

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuadsNvfp4Config:
        return cls({key: value for key, value in config.items() if key != "quant_method"})

    @classmethod
    def from_config_dict_json(cls, text: str) -> QuadsNvfp4Config:
        return cls.from_config(json.loads(text))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check that every pattern matches a module; vLLM calls this with the model's configuration at start-up.

        Raises:
            SettingsError: a pattern without a match.
        """
        patterns = (*(() if isinstance(self.settings.targets, str) else self.settings.targets), *self.settings.exclude)
        if self.rollout.mode == "bf16" or not patterns or hf_config is None:
            return
        try:
            modules = _modules(hf_config)
        except Exception as error:  # a model that transformers can't build may still run in vLLM
            logger.warning_once("quads_nvfp4: can't check the patterns %s against %s: %s", patterns, model_name, error)
            return
        for pattern, matched in self.targets.plan(modules).matches.items():
            logger.info_once("quads_nvfp4: pattern %r matched %d modules", pattern, len(matched))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Linear layers and fused experts that the targets want; None (vLLM's own method) for everything else.

        Raises:
            ValueError: the targets split a joined layer, or an engine option that this method can't serve.
            SettingsError: a residual allocation that this device can't have.
        """
        if self._table is None:
            self._start(get_current_vllm_config())
        if isinstance(layer, LinearBase):
            matrices = self._wanted(layer, prefix)
            if not matrices:
                return UnquantizedLinearMethod()
            return QuadsLinearMethod(self.rollout, self._table.canonical(prefix), matrices)
        if isinstance(layer, RoutedExperts):
            module = self._table.canonical(prefix)
            if self.rollout.mode != "bf16" and self.targets.wants(module):
                return QuadsMoEMethod(self.rollout, layer.moe_config, module)
        return None

    def _wanted(self, layer: LinearBase, prefix: str) -> Sequence[str]:
        """The matrices of a linear layer if they are to be quantized, else nothing."""
        if self.rollout.mode == "bf16":
            return ()
        module = self._table.canonical(prefix)
        parts = len(getattr(layer, "output_partition_sizes", (0,)))
        if not names.is_known(module, parts) and not self.targets.wants(module):
            return ()
        matrices = names.members(module, parts)
        wanted = [matrix for matrix in matrices if self.targets.wants(matrix)]
        if wanted and len(wanted) < len(matrices):
            left = [matrix for matrix in matrices if matrix not in wanted]
            raise ValueError(
                f"quads_nvfp4: vLLM joins {', '.join(matrices)} into one layer, so quads.targets and quads.exclude "
                f"must agree on them; they quantize {', '.join(wanted)} and leave out {', '.join(left)}"
            )
        return wanted

    def _start(self, vllm_config: VllmConfig) -> None:
        _check_engine(vllm_config)
        if projection.uses_operators(torch.device(current_platform.device_type), self.rollout.mode):
            self.rollout.residual.require_kernels()
        self._table = names.table_for(vllm_config.model_config.hf_config.model_type)
        first_load.check_when_built(vllm_config, self._table)
        logger.info_once("quads_nvfp4: %s", self.describe())

    def describe(self) -> str:
        """What runs, in one line."""
        if self.rollout.mode == "bf16":
            return "mode bf16: nothing is quantized"
        residual = self.rollout.residual
        how = f"{residual.granularity}, {residual.scope}, {residual.score}"
        if residual.allocation != "uniform":
            how += f", allocation {residual.allocation}"
        compensated = f", residual ratio {residual.ratio:g} ({how})"
        targets = self.settings.targets if isinstance(self.settings.targets, str) else list(self.settings.targets)
        return (
            f"mode {self.rollout.mode}{compensated if self.rollout.mode == 'w4a4' else ''}; targets {targets}"
            f"{', without ' + str(list(self.settings.exclude)) if self.settings.exclude else ''}; path: {path()}"
        )


def path() -> str:
    """Which implementation multiplies W4A4 (`quads_ops.dispatch.describe`); on a CPU it is always emulated in torch."""
    return dispatch.describe(current_platform.device_type)


def _modules(hf_config: Any) -> list[str]:
    """Canonical names of all modules that could be quantized, from the configuration alone (on the meta device)."""
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(hf_config)
    plain.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain)
    return list(quantizable_modules(model))


def _settings(options: Mapping[str, Any]) -> QuadsSettings:
    for key in options:
        if key not in _OPTIONS:
            raise SettingsError(f"quantization_config.{key}", options[key], f"no such option; {NAME} has {_OPTIONS}")
    block = {key: options[key] for key in _TOP if options.get(key) is not None}
    return QuadsSettings.from_dict({**block, "rollout": {key: options.get(key) for key in ("mode", "residual")}})


def _check_engine(vllm_config: VllmConfig) -> None:
    """Engine options that would silently do something else than asked."""
    parallel = vllm_config.parallel_config
    refused = {
        "a LoRA adapter (enable_lora)": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        f"kv_cache_dtype={vllm_config.cache_config.cache_dtype}": str(vllm_config.cache_config.cache_dtype) != "auto"
        and "fp8" in str(vllm_config.cache_config.cache_dtype),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # vLLM cuts experts over all of them, expert parallel or not.
        "experts over data parallel engines (data_parallel_size)": parallel.data_parallel_size > 1
        and vllm_config.model_config.is_moe,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "expert load balancing (enable_eplb)": parallel.enable_eplb,
    }
    found = [what for what, present in refused.items() if present]
    if found:
        raise ValueError(f"quads_nvfp4 does not support {', '.join(found)}; switch it off or use another quantization")
