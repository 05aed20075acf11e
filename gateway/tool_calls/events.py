"""Events that the parser finds in an output, in the order in which the model wrote it. Nothing is ever taken back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReasoningText:
    text: str


@dataclass(frozen=True)
class ContentText:
    text: str


@dataclass(frozen=True)
class CallBegins:
    """The call's name is complete. model_id: the id that the model gave the call, "" if it gives none."""

    index: int
    name: str
    model_id: str = ""


@dataclass(frozen=True)
class CallArguments:
    """The next characters of the arguments of call `index`."""

    index: int
    text: str


Event = ReasoningText | ContentText | CallBegins | CallArguments


@dataclass
class Call:
    index: int
    name: str
    model_id: str
    arguments: str = ""


@dataclass
class Folded:
    """The reasoning, content and calls of several events, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def fold(events: list[Event]) -> Folded:
    """Joins the texts of each kind. A call that began before these events has an empty name."""
    folded, calls = Folded(), dict[int, Call]()
    for event in events:
        match event:
            case ReasoningText(text):
                folded.reasoning += text
            case ContentText(text):
                folded.content += text
            case CallBegins(index, name, model_id):
                calls[index] = Call(index, name, model_id)
            case CallArguments(index, text):
                calls.setdefault(index, Call(index, "", "")).arguments += text
    folded.calls = list(calls.values())
    return folded
