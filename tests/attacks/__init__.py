"""What one client can do to its neighbours: legal requests that once filled Redis, stopped the engine or took
gigabytes, sent beside eight plain streams. `python -m tests.attacks` measures all of them.
"""
