"""What the machine that this process runs on has."""
