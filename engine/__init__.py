"""What the drafter and the verifier services share: model, paged KV cache, ragged batches, sampling."""
