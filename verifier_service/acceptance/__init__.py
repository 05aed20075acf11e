"""Acceptance rules: target laws and a proposal in, committed tokens out. One rule = one file; no I/O.

Every rule is `accept(law_at, proposal, ...) -> Acceptance`. `law_at(node)` returns the target's law after draft node
`node`: float64 [V], unnormalized log-probabilities; node -1 is the committed prefix. Laws are computed lazily, none
past the first rejection.
"""
