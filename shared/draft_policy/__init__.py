"""What several packages share of drafting: names of methods, load classes, A/B trials."""
