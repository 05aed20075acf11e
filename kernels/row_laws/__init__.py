"""The law of a row of logits on the CPU, compiled, and draws of chains from it."""
