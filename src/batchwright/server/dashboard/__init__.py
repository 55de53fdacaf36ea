"""The dashboard: the page at `/` that shows people what the service is doing."""
