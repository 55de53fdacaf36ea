"""Request-level batching compared: the same requests and the same model for every library."""
