"""Lines of input and output, shared by jobs and the service."""
