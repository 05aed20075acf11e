"""Errors of the training package, all one level deep. Not here: the services' errors (shared/errors.py)."""

from __future__ import annotations


class TrainingError(Exception):
    """Base class of this package's errors."""


class CorpusError(TrainingError):
    """The corpus is missing, empty, or belongs to another tokenizer."""


class CheckpointError(TrainingError):
    """A checkpoint does not match the run that resumes from it."""


class ExpansionError(TrainingError):
    """The requested shape cannot hold the source model, or the expanded model computes another function."""


class PromptError(TrainingError):
    """A prompt file, or one of its lines, is invalid."""


class DataError(TrainingError):
    """Training data are missing, malformed, outside the vocabulary, or too few."""


class DivergenceError(TrainingError):
    """Loss or gradients are not finite; the last checkpoint is from before."""


class ServerError(TrainingError):
    """The server gave no completion; the message quotes its answer."""


class SettingError(TrainingError):
    """An option's value is invalid, in general or for this target; the command ends with exit status 2."""
