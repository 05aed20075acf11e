"""Acceptance rules: target laws and a proposal in, committed tokens out. One rule = one file; no I/O.

Every rule is `accept(law_at, proposal, ...) -> Acceptance`. `law_at(node)` gives the target's law (float64 [V],
unnormalized log-probabilities) after draft node `node`, -1 meaning right after the committed prefix. Laws are asked
for lazily: nothing is computed past the first rejection.
"""
