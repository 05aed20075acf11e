"""The records of the architectures say nothing that is lost: each name is one of gguf's table for that architecture."""

from __future__ import annotations

import pytest

from outrider.engine.model.gguf.architecture import module_names, outside_names
from outrider.engine.model.gguf.architectures import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_module_of_a_record_is_a_tensor_of_the_file(name: str) -> None:
    """A name that the table lacks would be passed over, and its tensor refused in every file."""
    record = ARCHITECTURES[name]
    assert set(record.modules) <= set(module_names(name, record.modules).values())
    assert set(record.outside) <= set(outside_names(name, record.outside).values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_record_repeats_what_gguf_knows(name: str) -> None:
    record = ARCHITECTURES[name]
    known = module_names(name, record.modules)
    repeated = {
        tensor
        for tensor, parameter in record.parameters.items()
        for part, _, kind in [tensor.rpartition(".")]
        if part in known and f"{known[part]}.{kind}" == parameter
    }
    assert not repeated
