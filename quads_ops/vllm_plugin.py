"""vLLM calls register() in every one of its processes (entry point `vllm.general_plugins`)."""


def register() -> None:
    """Register the quantization method `quads_nvfp4`. Safe to call more than once."""
    from quads_ops.vllm_method import config  # noqa: F401  (importing it registers)
