"""Computation of requests: OpenAI request bodies in, OpenAI response bodies out."""
