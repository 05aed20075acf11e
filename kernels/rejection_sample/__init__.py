"""Rejection sampling of drafted chains, batched over sessions."""
