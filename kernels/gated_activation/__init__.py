"""act(gate) * up in one pass over the rows of a gated MLP."""
