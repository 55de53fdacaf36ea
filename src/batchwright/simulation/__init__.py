"""Simulation of engines in virtual time: their own scheduler over the measured costs of their steps."""
