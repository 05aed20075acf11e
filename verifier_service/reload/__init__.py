"""Replaces the target's weights while the verifier serves."""
