"""What several packages share of drafting: the names of methods, and texts that are predicted."""
