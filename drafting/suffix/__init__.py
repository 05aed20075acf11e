"""Suffix decoding: proposes what followed the same text before."""
