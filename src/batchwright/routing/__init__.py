"""Decisions which of several replicas of a model computes a request. Pure: time comes in as an argument."""
