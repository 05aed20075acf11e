"""Runs models for the drafter and the verifier: loading, paged KV cache, ragged batches, sampling."""
