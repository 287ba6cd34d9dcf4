"""NVFP4 numerics, fake-quantized modules, residual compensation, and the vLLM quantization method."""
