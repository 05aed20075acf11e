"""Soak: a stack at saturation for half an hour; memory, descriptors, threads and latency must not grow.

`make soak MINUTES=30`; a minute of it runs with the tests.
"""
