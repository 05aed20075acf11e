"""Rejection mode for chains, a batch of sessions at once."""
