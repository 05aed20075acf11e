"""The simulated Redis: its data, and the process that may lose them."""
