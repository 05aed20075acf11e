"""Shared by the sampling kernels: a row's law after temperature, top-k, top-p and min-p."""
