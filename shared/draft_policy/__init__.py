"""Parts of drafting that several packages share: names of methods, load classes, A/B trials."""
