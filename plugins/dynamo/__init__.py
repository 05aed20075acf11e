"""Outrider as a worker of NVIDIA Dynamo: python -m outrider.plugins.dynamo --gateway HOST:PORT --model NAME.

A worker here has no weights. It hands each request to a gateway, and when Dynamo migrates a request to another worker,
that one goes on from Outrider's log. worker.py is what Dynamo drives; the rest needs httpx alone.
"""
