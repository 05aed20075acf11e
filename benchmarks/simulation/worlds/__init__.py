"""Worlds of the held-out benchmark: texts, cells, random worlds, and running them."""
