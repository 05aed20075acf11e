"""POST /v1/responses: OpenAI's Responses API, answered by what chat completions do."""
