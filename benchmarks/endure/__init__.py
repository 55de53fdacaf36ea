"""A service under steady load for long: what its clients get, and what it holds."""
