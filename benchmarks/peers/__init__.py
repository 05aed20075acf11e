"""Other systems that a benchmark measures in the same run."""
