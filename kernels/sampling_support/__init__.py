"""What the sampling kernels share: a row's law after temperature, top-k, top-p and min-p."""
