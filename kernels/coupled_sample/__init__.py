"""The token that wins a row's race of exponential variables (exact mode's sampler)."""
