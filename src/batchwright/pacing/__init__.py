"""How fast requests may be sent to a remote endpoint: pure decisions, with the time as an argument."""
