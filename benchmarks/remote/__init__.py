"""What a line costs this process when an endpoint elsewhere computes it."""
