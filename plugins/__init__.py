"""Outrider's drafters inside engines of other makes.

Each engine has a module with the class that it loads (vllm.py, transformers.py). It runs in the engine's own process,
so it needs grpc, protobuf and numpy only, and nothing that a drafter does may raise there, or wait past a deadline.
"""
