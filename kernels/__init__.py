"""Numeric kernels: one folder per operation, each with `reference.py` as the oracle."""
