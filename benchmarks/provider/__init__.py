"""A provider of models with limits that are hidden, stated or drifting, and the clients measured against it."""
