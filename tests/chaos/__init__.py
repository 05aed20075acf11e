"""Chaos: random deaths, pauses and cut connections under load; every stream's bytes equal the undisturbed run's.

`python -m tests.chaos --requests 1000`; a short storm runs with the tests.
"""
