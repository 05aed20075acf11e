"""RMS normalisation of rows, as transformers computes it in one of its three orders of rounding."""
