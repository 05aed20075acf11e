"""What is raised when part of a batch failed. Not here: single requests' errors (shared/errors.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shared.errors import OutriderError

if TYPE_CHECKING:
    from offline.outputs import RequestOutput


class GenerationFailed(OutriderError):
    """Raised once every request of a batch has ended: nobody's output is lost by another one's error.

    outputs: in the order of the prompts, None where a request failed. failures: index of the prompt -> its error.
    """

    def __init__(
        self,
        outputs: Sequence[RequestOutput | None],
        failures: Mapping[int, Exception],
        request_ids: Sequence[str],
    ) -> None:
        first = min(failures)
        error = failures[first]
        super().__init__(
            f"{len(failures)} of {len(outputs)} requests failed, the first of them prompt {first} (request "
            f"{request_ids[first]}): {type(error).__name__}: {error}; `outputs` of this error holds the others",
            param=error.param if isinstance(error, OutriderError) else None,
        )
        self.outputs = list(outputs)
        self.failures = dict(failures)
