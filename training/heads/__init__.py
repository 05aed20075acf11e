"""Training objectives of the draft heads, one per file. Not here: the heads themselves (drafting.heads)."""
