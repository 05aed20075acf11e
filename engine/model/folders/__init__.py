"""Folders that the engine makes of checkpoints in other layouts than transformers reads."""
