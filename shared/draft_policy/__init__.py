"""Parts of drafting that several packages share: the names of methods, and texts that are predicted."""
