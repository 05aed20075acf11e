"""Replaces modules of a model by ones that compute the same in fewer kernels, each checked on the model itself."""
