"""Fuzzing: the servers of a running stack and the parsers behind them, with input that nobody would send on purpose.

`python -m tests.fuzz --inputs 100000`; a short form runs with the tests.
"""
