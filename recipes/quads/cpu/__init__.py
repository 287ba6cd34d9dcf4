"""Running verl without an accelerator: a platform for verl's registry, and three narrow patches."""


def activate() -> None:
    """Make "cpu" the platform of this process. Call it before anything asks verl for a platform."""
    from verl.plugin.platform.platform_manager import set_platform

    from quads_recipe.cpu import process_group, vllm_name
    from quads_recipe.cpu.platform import CpuPlatform

    vllm_name.patch()
    set_platform(CpuPlatform())
    process_group.patch()
