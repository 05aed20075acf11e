"""Selective state spaces of Mamba-1 with their short convolution (Jamba)."""
