"""Row lookups, sums and conversions of a forward, where a compiled program needs them."""
