"""Packed weights, dequantised while they are read: one format = one file."""
