"""Heads over a paged cache: their forwards, the rows that each session has in it, and their recorded programs."""
