"""The encoder's attention in C++, compiled on the machine that runs it; where it cannot be, torch does its work."""

from batchwright.encoder.native.encoder_kernel import NativeBidirectional, load_bidirectional

__all__ = ["NativeBidirectional", "load_bidirectional"]
