"""Quantised weights packed in memory, against the same weights dequantised."""
