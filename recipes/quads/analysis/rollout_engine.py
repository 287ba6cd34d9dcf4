"""The real rollout, without RL: a vLLM engine with the quantization method quads_nvfp4, or without for mode bf16."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quads_ops.settings import QuadsSettings
from quads_recipe.analysis.masks import SiteResidual, from_rollout
from quads_recipe.analysis.score import Sample

if TYPE_CHECKING:
    import torch

_DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # In this process: starting another costs as much as loading a small model.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
EXTENSION = "quads_ops.vllm_method.diagnosis.QuadsDiagnosis"


@dataclass(frozen=True)
class Generated:
    """A response as the engine sampled it, with the logprob it reported for each token (nats)."""

    sample: Sample
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class EngineOptions:
    """What the engine needs beyond the `quads` block."""

    model: str
    dtype: str
    """`bfloat16` or `float32`"""
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    gpu_memory_utilization: float = 0.6


class RolloutEngine:
    """A context manager around one engine; it is shut down at the end.

    Args:
        options: model and sizes.
        settings: the `quads` block; `rollout` and the targets are used.
    """

    def __init__(self, options: EngineOptions, settings: QuadsSettings):
        self.options, self.settings = options, settings
        self._llm = None

    def __enter__(self) -> RolloutEngine:
        prepare_environment()
        from vllm import LLM
        from vllm.platforms import current_platform

        quantized = self.settings.rollout.mode != "bf16"
        overrides = {"quantization_config": self.settings.vllm_quantization_config()} if quantized else {}
        self._llm = LLM(
            model=self.options.model,
            skip_tokenizer_init=True,
            dtype=self.options.dtype,
            max_model_len=self.options.max_model_len,
            enforce_eager=True,  # CUDA graphs would keep the ratio that they were captured with (`set_ratio`)
            # Where a prompt is cut in two, vLLM takes back the draw after its first part, and can't on a CPU if the
            # request has a seed (0.28: "CPU Generator does not use offset"). So there no prompt is cut.
            enable_chunked_prefill=False if current_platform.is_cpu() else None,
            enable_prefix_caching=False,
            gpu_memory_utilization=self.options.gpu_memory_utilization,
            hf_overrides=overrides,
            worker_extension_cls=EXTENSION,
            seed=0,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        return self

    def __exit__(self, *_) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()

    def generate(self, prompts: Sequence[Sequence[int]], max_new: int, seed: int) -> list[Generated]:
        """One response per prompt, sampled at temperature 1 from the whole distribution, as in training.

        seed: of the first prompt; the others count on from it. At most `max_new` tokens, ended by a stop token.
        """
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=max_new,
                seed=seed + i,
                logprobs=0,
                stop_token_ids=list(self.options.stop_token_ids),
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        generated = []
        for prompt, output in zip(prompts, self._llm.generate(requests, params, use_tqdm=False), strict=True):
            tokens = tuple(output.outputs[0].token_ids)
            reported = tuple(e[t].logprob for e, t in zip(output.outputs[0].logprobs, tokens, strict=True))
            generated.append(Generated(Sample(tuple(prompt), tokens), reported))
        return generated

    def score(self, samples: Sequence[Sample]) -> list[Generated]:
        """The engine's logprobs of responses that it did not sample itself, from its prefill."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        requests = [{"prompt_token_ids": [*s.prompt, *s.response]} for s in samples]
        scored = []
        for sample, output in zip(samples, self._llm.generate(requests, params, use_tqdm=False), strict=True):
            entries = output.prompt_logprobs[len(sample.prompt) :]
            reported = tuple(e[t].logprob for e, t in zip(entries, sample.response, strict=True))
            scored.append(Generated(sample, reported))
        return scored

    def set_ratio(self, ratio: float) -> None:
        """Change the residual ratio of every layer; masks are chosen anew from the statistics gathered so far."""
        self.set_residual(ratio)

    def set_residual(
        self, ratio: float, score: str | None = None, allocation: str | None = None
    ) -> dict[str, float | bool | None]:
        """The same with another score and allocation of masks.

        Returns a summary: `ratio`, `ratio_min` and `ratio_max` of the layers, `cost`, and more.
        """
        return self._llm.collective_rpc("quads_set_residual", args=(ratio, score, allocation))[0]

    def set_sensitivity(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Squared gradients of every input (`TrainerSide.sensitivities`), for masks that are chosen from now on."""
        plain = {name: vector.tolist() for name, vector in vectors.items()}
        self._llm.collective_rpc("quads_set_sensitivity", args=(plain,))

    def choose_masks(self) -> list[dict[str, float | bool | None]]:
        """End a period of statistics, as a weight sync does: choose masks from it.

        Returns one summary per worker; `energy_covered` is about the masks that were in force during that period.
        """
        return self._llm.collective_rpc("quads_refresh_masks")

    def residuals(self) -> dict[str, SiteResidual]:
        """Site -> residual compensation in force."""
        return from_rollout(self._llm.collective_rpc("quads_masks"))


def prepare_environment() -> None:
    """Defaults for vLLM, which reads them when it is imported. What is set already stays."""
    import torch

    for name, value in (_DEFAULT_ENVIRONMENT | ({} if torch.cuda.is_available() else _CPU_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)
