"""The fleet: its verifiers and drafters, and the choice of those that a session gets."""
