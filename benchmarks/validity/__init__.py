"""Whether answers satisfy the schemas of others: what is refused, and what validators say of the rest."""
