"""The CPU runtime: see README.md."""
