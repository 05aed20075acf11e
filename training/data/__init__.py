"""Prompts and training rows."""
