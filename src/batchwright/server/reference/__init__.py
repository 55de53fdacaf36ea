"""The reference of the HTTP API, made from its OpenAPI description: as the page `/docs`, and as Markdown."""
