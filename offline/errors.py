"""The error of a partly failed batch. Not here: single requests' errors (shared/errors.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outrider.shared.errors import OutriderError

if TYPE_CHECKING:
    from outrider.offline.outputs import RequestOutput


class GenerationFailed(OutriderError):
    """Raised once every request of a batch has ended, so that one error loses no other output.

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
            f"{len(failures)} of {len(outputs)} requests failed, first prompt {first} (request "
            f"{request_ids[first]}): {type(error).__name__}: {error}; `outputs` of this error has the others",
            param=error.param if isinstance(error, OutriderError) else None,
        )
        self.outputs = list(outputs)
        self.failures = dict(failures)
