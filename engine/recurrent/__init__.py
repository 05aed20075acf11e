"""Recurrent layers of hybrid models: mixers of our own in place of transformers', and the states of sessions."""
