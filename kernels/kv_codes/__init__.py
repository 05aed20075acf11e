"""Keys and values in 8 bits: what a row's codes are, where they lie, and how kernels read and make them."""
