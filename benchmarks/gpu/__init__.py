"""What only an NVIDIA GPU can show."""
