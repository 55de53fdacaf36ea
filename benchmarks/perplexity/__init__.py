"""What a precision costs in quality: the perplexity of a text under the same weights."""
