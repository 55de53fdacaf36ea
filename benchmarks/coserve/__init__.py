"""Two classes of traffic on one engine, measured."""
