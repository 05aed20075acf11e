"""Sources of a session's draft tokens: a drafter service, or the verifier itself."""
