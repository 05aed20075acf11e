"""Which verifiers and drafters exist, and which of them a session gets."""
