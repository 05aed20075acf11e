"""Causal depthwise convolution over the last few rows of a session (LFM2, and the front of every other recurrence)."""
