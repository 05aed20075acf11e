"""The architectures that are read from GGUF."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engine.model.gguf.architecture import Architecture
from outrider.engine.model.gguf.dense import DENSE
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.gemma import GEMMA
from outrider.engine.model.gguf.hybrids import HYBRIDS
from outrider.engine.model.gguf.mixtures import MIXTURES

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **GEMMA, **MIXTURES, **HYBRIDS}


def architecture_of(file: GgufFile) -> Architecture:
    """Returns the file's architecture. Raises ModelRefused for an architecture that is not read."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise file.not_read(f"its architecture is {file.architecture!r}; of GGUF files, {known} are read")
    return found
