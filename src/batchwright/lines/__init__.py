"""Lines of input and output, in every way of computing them."""
