"""The commit log in Redis."""
