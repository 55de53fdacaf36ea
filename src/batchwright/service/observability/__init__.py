"""What the service tells of itself: logs, metrics, traces."""
