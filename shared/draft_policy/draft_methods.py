"""The names of draft methods: ours, and those of vLLM that mean one of ours or are refused.

Not here: what a method needs and does (drafting/methods/registry.py), and which the fleet serves (gateway/fleet).
"""

from __future__ import annotations

from outrider.shared.errors import ConfigError

AUTO = "auto"
OFF = "off"
# Not a choice: names the drafts that a verifier with `auto` takes from a request's prediction.
PREDICTION = "prediction"
WITHOUT_CHECKPOINT = ("suffix", "ngram")
# From the files of the target itself.
FROM_TARGET = ("mtp",)
FROM_CHECKPOINT = ("eagle3", "dspark", "dflash", "eagle", "draft_model", "mlp_speculator", "medusa")
_WITH_LOOKUP_ENDING = "+suffix"


def with_lookup(method: str) -> str:
    """Returns the name of the method that drafts as `method` does, or as `suffix` where that is surer."""
    return method + _WITH_LOOKUP_ENDING


def without_lookup(method: str) -> str:
    """Returns the method that `with_lookup` named, or `method` itself."""
    return method.removesuffix(_WITH_LOOKUP_ENDING)


# Each is served where both of its parts are.
WITH_LOOKUP = tuple(map(with_lookup, (*FROM_TARGET, *FROM_CHECKPOINT)))
_ONE_PASS = ("medusa", "dspark", "dflash")
# All tokens of a draft come at once: a longer one hardly takes longer.
ONE_PASS = frozenset((*_ONE_PASS, *map(with_lookup, _ONE_PASS), *WITHOUT_CHECKPOINT))
# The order in which `auto` tries them: the method that is right most often first.
_ALONE = (*FROM_TARGET, *FROM_CHECKPOINT, *WITHOUT_CHECKPOINT)
DRAFT_METHODS = (*WITH_LOOKUP, *_ALONE)
# vLLM's name -> ours for the same proposals: its GPU n-gram lookup differs in where it is computed.
_SAME = {"ngram_gpu": "ngram"}
# vLLM's older names of `mtp`, one for each family of models, end in this.
_OLD_MTP_ENDING = "_mtp"
# vLLM's methods that are not served -> what to use instead.
_ELSEWHERE = {
    "extract_hidden_states": "it drafts nothing; `outrider train` computes the hidden states that it trains on",
    "custom_class": "no code is loaded by its name; use one of the methods here",
}


def known_method(name: str, setting: str) -> str:
    """Our name of the method. setting: for the message. Raises ConfigError that lists the names, or says what to use
    instead of a method of vLLM's.
    """
    name = "mtp" if name.endswith(_OLD_MTP_ENDING) else _SAME.get(name, name)
    if name in (AUTO, OFF, *DRAFT_METHODS):
        return name
    foreign = _ELSEWHERE.get(name)
    if foreign is not None:
        raise ConfigError(f"{setting}: method {name} is not served: {foreign}", param="method")
    choices = ", ".join((AUTO, OFF, *_ALONE))
    with_ending = f"one with weights may end in {_WITH_LOOKUP_ENDING}"
    raise ConfigError(f"{setting}: method {name[:80]!r} is not one of {choices}; {with_ending}", param="method")
