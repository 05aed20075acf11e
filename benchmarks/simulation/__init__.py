"""A fleet in simulated time, from costs measured on the real services: see benchmarks/simulate.py."""
