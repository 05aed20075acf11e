"""Models of transformers that compute attention themselves, or drop `paged` before its interface."""
