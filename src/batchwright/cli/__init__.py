"""The command line. It parses and prints; decisions are made elsewhere."""
