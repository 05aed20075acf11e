"""Errors of the training package. Not for the services: they have their own in `shared`."""

from __future__ import annotations


class TrainingError(Exception):
    """Base of every error that this package raises on purpose."""


class CorpusError(TrainingError):
    """The corpus is missing, empty, or does not belong to the tokenizer in use."""


class CheckpointError(TrainingError):
    """A checkpoint does not fit the run that wants to resume from it."""


class ExpansionError(TrainingError):
    """The wished-for shape cannot hold the source model, or the expanded model is not the same function."""
