"""Our attention behind transformers' interface, and the paged KV cache."""
