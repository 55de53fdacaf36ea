"""Calls of tools and thoughts in generated text: the formats that models write them in, and what these mean."""
