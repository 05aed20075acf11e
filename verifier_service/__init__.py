"""The verifier service: the target model, its KV cache, and the decision which tokens are committed."""
