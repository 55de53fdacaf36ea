"""A batch of very many lines through the worker and the store, against a loop that has neither."""
