"""The load generator behind `outrider bench`, for any OpenAI-compatible server. Names and figures are those of vLLM's
`bench serve`.
"""
