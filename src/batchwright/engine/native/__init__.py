"""CPU kernels in C++, from the wheel or compiled on the machine that runs them; where there are none, torch is used."""

from batchwright.engine.native.kernels import NativeKernels, load_kernels

__all__ = ["NativeKernels", "load_kernels"]
