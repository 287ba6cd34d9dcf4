"""A kernel with fixed types and constants, as `benchmarks/compile_report.py` compiles it without a GPU."""

from typing import NamedTuple


class Variant(NamedTuple):
    name: str
    """Unique together with the target."""
    kernel: object
    """The @triton.jit function."""
    types: dict[str, str]
    """Type of each runtime argument: "*u8", "*fp32", "i32", ..."""
    constants: dict[str, object]
    """Value of each constexpr, and None for a pointer that is not given."""
    warps: int = 4
    stages: int = 3
    native: bool = False
    """Claims to multiply NVFP4 in the tensor core."""
    aligned: tuple[str, ...] = ()
    """Integer arguments that Triton may assume to be divisible by 16. Pointers always are, as torch allocates them."""
    registers: int | None = None
    """Most registers a thread may have; None: what the compiler thinks best."""
