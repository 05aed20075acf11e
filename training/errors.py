"""Errors of the training package. Not here: the services' errors (shared/errors.py).

TrainingError
├── CorpusError       the corpus is missing, empty, or of another tokenizer
├── CheckpointError   a checkpoint does not match the run
├── ExpansionError    a shape cannot hold the source model
├── PromptError       a prompt file is invalid
├── DataError         training data are invalid or too short
├── DivergenceError   the loss is not finite
├── ServerError       the completion server refuses or is unreachable
└── SettingError      an option is invalid, or does not match the target      exit status 2
"""

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
    """An option's value is invalid, in general or for this target."""
