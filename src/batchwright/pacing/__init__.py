"""How fast an endpoint elsewhere may be asked: pure decisions, with the time as an argument."""
