"""Loading checkpoints as row-invariant models."""
