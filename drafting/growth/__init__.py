"""Grows a proposal, chain or tree, from a net's logits at its positions."""
