"""Draft models with another vocabulary than the target's."""
