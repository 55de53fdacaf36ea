"""Replicas of a model: on devices of known speed in virtual time, and as processes on this machine."""
