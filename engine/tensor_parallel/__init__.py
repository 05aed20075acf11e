"""One target on several processes of one machine: each rank holds a share of every large weight and of the KV cache."""
