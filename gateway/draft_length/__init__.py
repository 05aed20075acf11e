"""`auto`: the draft method and the number of draft tokens of each round, learned per verifier."""
