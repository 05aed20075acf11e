"""Linears on quantised weights in integers: activations in 8 bits, by row and group of inputs."""
