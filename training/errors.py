"""Errors of the training package. Not for the services: they have their own in `shared`.

TrainingError
├── CorpusError       the corpus is missing, empty, or not the tokenizer's
├── CheckpointError   a checkpoint does not fit the run
├── ExpansionError    a shape cannot hold the source model
├── PromptError       a prompt file is wrong
├── DataError         training data are wrong or too short
├── DivergenceError   the loss is no number any more
├── ServerError       the server that is asked for completions refuses or is not there
└── SettingError      an option is wrong, or does not fit the target          exit status 2
"""

from __future__ import annotations


class TrainingError(Exception):
    """Base of every error that this package raises on purpose."""


class CorpusError(TrainingError):
    """The corpus is missing, empty, or does not belong to the tokenizer in use."""


class CheckpointError(TrainingError):
    """A checkpoint does not fit the run that wants to resume from it."""


class ExpansionError(TrainingError):
    """The wished-for shape cannot hold the source model, or the expanded model is not the same function."""


class PromptError(TrainingError):
    """A file of prompts, or one of its lines, is not what it should be."""


class DataError(TrainingError):
    """Training data are missing, malformed, outside the vocabulary, or too few."""


class DivergenceError(TrainingError):
    """Loss or gradients are not finite; the last checkpoint is from before that."""


class ServerError(TrainingError):
    """The server did not give a completion; the message holds its words."""


class SettingError(TrainingError):
    """An option has a value that cannot be, by itself or with this target."""
