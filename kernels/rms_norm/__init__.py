"""RMS normalisation of rows, in one of transformers' three orders of rounding."""
