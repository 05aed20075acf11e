"""The HTTP server: routes, the answers to them, and what guards its door."""
