"""Patch, verl 0.9.1: `initialize_global_process_group_ray` builds the backend "cpu:gloo,<device>:<backend>".

For device "cpu" that is "cpu:gloo,cpu:gloo", which torch refuses (duplicate device type). The patch passes "cpu:gloo".
tests/test_cpu_platform.py fails once verl no longer needs it.
"""


def patch() -> None:
    """Replace the function in verl.utils.distributed; callers import it from there later. Idempotent."""
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray
    if getattr(original, "_quads", False):
        return

    def initialize_global_process_group_ray(timeout_second=None, backend=None):
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    initialize_global_process_group_ray._quads = True
    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
