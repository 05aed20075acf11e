"""Where a session's draft tokens come from: a drafter service, or the verifier itself."""
