"""Constants of the number formats: E2M1 (4-bit float), E4M3 (8-bit float, no infinity) and NVFP4, which joins them.

An NVFP4 tensor holds a 4-bit E2M1 code per element, an E4M3 scale byte per block of 16 elements along the reduction
dimension K, and an FP32 scale per matrix (weights) or per token (activations).
Source: OCP Microscaling Formats v1.0 (E2M1), OCP 8-bit Floating Point v1.0 (E4M3), NVIDIA's description of NVFP4.
"""

BLOCK_SIZE = 16
"""Elements along K that share one block scale."""

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit E2M1 code; bit 3 of a code is the sign."""

E2M1_SIGN = 0x8

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
"""The scale byte of a block that holds NaN or Inf, so that the whole block dequantizes to NaN."""

GLOBAL_SCALE_DIVISOR = E2M1_MAX * E4M3_MAX
"""2688: the largest magnitude a block can hold before the global scale."""

GLOBAL_SCALE_MIN = 2.0**-117
"""Smallest global scale. The smallest E4M3 scale is 2^-9, so block scale times global scale stays a normal FP32."""
