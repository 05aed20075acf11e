"""The path of a draft tree that the target's sampled tokens confirm."""
