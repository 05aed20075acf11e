"""What gateway and verifier share to decide how much is drafted: priced lengths, load classes, A/B trials."""
