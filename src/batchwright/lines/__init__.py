"""Lines of input and output, whoever computes them."""
