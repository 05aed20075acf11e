"""Supports draft models with another vocabulary than the target's."""
