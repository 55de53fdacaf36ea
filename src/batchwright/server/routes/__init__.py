"""Routes of the service, with a module for each group of endpoints."""
