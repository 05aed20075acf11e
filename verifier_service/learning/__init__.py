"""Drafting that learns from what the verifier serves (`--learn`). The training itself is another process's."""
