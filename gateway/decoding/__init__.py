"""Runs requests: which verifier and drafter each output has, its rounds, and what happens when one is lost."""
