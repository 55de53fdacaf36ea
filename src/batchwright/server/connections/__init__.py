"""Connections of clients: how many there may be, how long they may take, and what of HTTP/1.1 they may send."""
