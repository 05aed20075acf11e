"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, answered by what chat completions do."""
