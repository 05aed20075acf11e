"""What an answer of /v1/responses says besides its output, so that any gateway can continue it."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ResponsePlan:
    """fields: JSON, those of the request that the answer repeats. input_items: JSON, the items of the input, with those
    of the responses before it; "" where nothing is stored.
    """

    fields: str
    input_items: str = ""

    @property
    def is_background(self) -> bool:
        """Whether it is generated to its end, read or not."""
        return bool(json.loads(self.fields).get("background"))
