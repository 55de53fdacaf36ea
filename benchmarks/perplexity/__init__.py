"""The cost in quality of a precision: the perplexity of a text under the same weights."""
