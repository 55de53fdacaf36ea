"""CPU kernels in C++, compiled on the machine that runs them; if they cannot be compiled, torch does their work."""

from batchwright.engine.native.kernels import NativeKernels, load_kernels

__all__ = ["NativeKernels", "load_kernels"]
