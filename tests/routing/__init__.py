"""Tests of the decisions which replica computes what."""
