"""The process that goes on training a draft head on what its verifier serves (verifier_service/learning starts it)."""
