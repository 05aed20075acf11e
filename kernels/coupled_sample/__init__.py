"""Exact mode's sampler: the token that wins a row's race of exponential variables."""
