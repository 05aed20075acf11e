"""Modules of a model replaced by ones that compute the same in fewer kernels, each checked on the model itself."""
