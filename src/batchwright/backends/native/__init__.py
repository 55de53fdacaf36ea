"""The encoder's attention in C++, compiled on the machine that runs it; where it cannot be, torch does its work."""

from batchwright.backends.native.kernel import NativeBidirectional, load_bidirectional

__all__ = ["NativeBidirectional", "load_bidirectional"]
