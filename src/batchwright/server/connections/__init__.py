"""Connections of clients: how many there may be, how long they may take, and which parts of HTTP/1.1 they may use."""
