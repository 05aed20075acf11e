"""Sampling: from logits to tokens, with probability laws, shared noise and grammars."""
