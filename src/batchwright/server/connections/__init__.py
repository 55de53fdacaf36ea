"""Connections of clients: how many there are, how long they may take, and what of HTTP is let through."""
