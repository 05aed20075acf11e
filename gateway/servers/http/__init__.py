"""The HTTP server: routes, the answers to them, and what protects it."""
