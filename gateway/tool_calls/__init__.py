"""What a model writes besides its answer: reasoning and tool calls, read from its tokens and asked for by grammars."""
