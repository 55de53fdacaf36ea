"""Observability of the service: logs, metrics and traces."""
