"""What a line costs this process if a remote endpoint computes it."""
