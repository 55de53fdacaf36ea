"""A service under steady load for a long time: what its clients get, and what it holds."""
