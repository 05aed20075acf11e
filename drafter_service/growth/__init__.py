"""How a proposal grows, chain or tree, from what a net says about each of its places."""
