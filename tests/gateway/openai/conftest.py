"""A served model without a socket."""

from __future__ import annotations

import pytest
from gateway_script import ScriptedService

from outrider.gateway.request.served import RequestLimits, Served
from outrider.gateway.request.tokenizer import Tokenizer


@pytest.fixture
def served(tokenizer: Tokenizer) -> Served:
    limits = RequestLimits(max_n=8, max_sequences=10, max_stop_strings=4, max_stop_chars=20, max_grammar_chars=99)
    return Served(ScriptedService(tokenizer).model, tokenizer, limits)
