"""Mixers that replace transformers' recurrent modules: one family, one file."""
