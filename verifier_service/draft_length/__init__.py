"""The decisions of `auto` at the verifier: which method drafts, how many tokens, and what that may cost."""
