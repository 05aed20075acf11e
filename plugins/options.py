"""What a user says to the proposer: the object `outrider` in an engine's own configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
_KINDS: dict[str, tuple[type, ...]] = {"float": (int, float), "bool": (bool,), "str": (str,)}


@dataclass(frozen=True)
class Options:
    """drafters: host:port of each. The key is in the environment, where no process list shows it.

    deadline_ms: longest time that a step waits for drafts. min_confidence: a draft ends where the product of the
    confidences in its tokens falls below it, if the method states them. auto_off: no drafts while they do not pay.
    """

    drafters: tuple[str, ...]
    method: str = "draft_model"
    deadline_ms: float = 20.0
    min_confidence: float = 0.1
    auto_off: bool = True
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""

    @classmethod
    def read(cls, given: Any) -> Options:
        """Raises ValueError that names the option."""
        if not isinstance(given, Mapping) or not given.get("drafters"):
            raise ValueError('additional_config must have {"outrider": {"drafters": ["host:port", ...]}}')
        known = {field.name: field for field in fields(cls)}
        if unknown := given.keys() - known.keys():
            raise ValueError(f"outrider has no option {sorted(unknown)[0]!r}, only {', '.join(known)}")
        drafters = given["drafters"]
        if not isinstance(drafters, list) or not all(isinstance(entry, str) and ":" in entry for entry in drafters):
            raise ValueError(f"outrider.drafters: {drafters!r} is not a list of host:port")
        for name, value in given.items():
            kind = _KINDS.get(str(known[name].type))
            if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind)):
                raise ValueError(f"outrider.{name}: {value!r} is not a {known[name].type}")
        made = cls(**{**given, "drafters": tuple(dict.fromkeys(drafters))})
        if not 0 < made.deadline_ms <= 10_000:
            raise ValueError(f"outrider.deadline_ms: {made.deadline_ms} is not in (0, 10000]")
        if bool(made.tls_cert_file) != bool(made.tls_key_file) or (made.tls_cert_file and not made.tls_ca_file):
            raise ValueError("outrider.tls_cert_file needs outrider.tls_key_file and outrider.tls_ca_file")
        return made

    def metadata(self) -> tuple[tuple[str, str], ...]:
        key = os.environ.get(API_KEY_VARIABLE, "")
        return (("authorization", f"Bearer {key}"),) if key else ()
