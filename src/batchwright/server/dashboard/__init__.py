"""The page at `/`: what the service is doing, for people."""
