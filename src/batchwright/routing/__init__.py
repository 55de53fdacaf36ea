"""Decisions about which replica of a model computes a request. Pure: time is an argument."""
