"""Draft methods, for drafters and for verifiers that draft in their own process."""
