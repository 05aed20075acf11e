"""Stacks and traffic of the held-out cells on the real stack (benchmarks/never_slower_held_out.py)."""
