"""Selective state spaces of Mamba-2 with their short convolution (Bamba, Nemotron-H, Falcon-H1, Granite 4)."""
