"""Mixers in place of transformers' recurrent modules: one family, one file."""
