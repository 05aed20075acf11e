"""A whole stack on one machine as child processes."""
