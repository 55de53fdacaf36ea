"""Pictures of what the scenes recorded. Needs matplotlib."""
