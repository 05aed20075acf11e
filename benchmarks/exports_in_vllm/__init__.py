"""Asks whether vLLM accepts what `outrider train export` writes: see __main__.py."""
