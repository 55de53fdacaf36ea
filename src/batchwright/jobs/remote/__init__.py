"""Files that are not on this machine: read and written by their addresses, through fsspec."""
