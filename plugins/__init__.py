"""Outrider inside engines and hosts of other makes.

Engines that are drafted for have a module with the class that they load (vllm.py, sglang.py, tensorrt_llm.py,
transformers.py). It runs in the engine's own process, so it needs grpc, protobuf and numpy only, and nothing that a
drafter does may raise there, or wait past a deadline. dynamo/ is the other way round: a host whose requests Outrider
decodes.
"""
