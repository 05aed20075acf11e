"""The exact-mode grid: one output per (model, prompt, seed, parameters), whoever drafts and however it is computed.

Not a unit test of any part: real engines and draft methods in one process, without sockets. `python -m tests.grid`
runs as much of it as wanted, `pytest tests/grid` a sample in which every pair of axis values occurs for every model.
"""
