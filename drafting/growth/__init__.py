"""How a proposal grows, chain or tree, from a net's logits at its positions."""
