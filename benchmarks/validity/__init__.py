"""Whether answers satisfy third-party schemas: what is refused, and what validators say about the rest."""
