"""Scores of cached keys, by which a sparse attention chooses what each row attends."""
