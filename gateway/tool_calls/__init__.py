"""Reasoning and tool calls in a model's output: read from its tokens, and enforced by grammars."""
