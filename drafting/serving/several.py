"""Several heads of one kind as one draft method: each session is drafted for by one of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.serving.head_choice import HeadChoice
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.errors import ConfigError
from outrider.shared.messages import DraftHead, DraftMethodInfo, Proposal

log = logging.getLogger(__name__)


@dataclass
class _Bound:
    """A session's head, and how right its drafts were. asked: the newest draft, until its tokens are committed."""

    head: str
    asked: Proposal | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    num_wrong: int = 0

    def settle(self, session: DraftSession) -> None:
        """Compares the newest draft with what was committed since."""
        asked, self.asked = self.asked, None
        if asked is None or session.committed_len <= asked.base_len:
            return
        committed = session.token_ids[session.prompt_len + asked.base_len :]
        num_accepted, depth = _agreed(asked, committed)
        self.num_drafts += 1
        self.num_accepted += num_accepted
        self.num_wrong += num_accepted < min(depth, len(committed))


def joined(
    built: Mapping[str, Mapping[str, DraftMethod]], ready: Callable[[DraftMethod], DraftMethod]
) -> dict[str, DraftMethod]:
    """Returns what serves of each method: its only head, or several as one. ready: called with each head first."""
    heads = {name: {head: ready(method) for head, method in of_kind.items()} for name, of_kind in built.items()}
    return {
        name: SeveralHeads(of_kind) if len(of_kind) > 1 else next(iter(of_kind.values()))
        for name, of_kind in heads.items()
    }


class SeveralHeads:
    """Implements drafting.methods.interface.DraftMethod. All is called from one thread.

    heads: by name, of one kind and shape. A session keeps the head that it begins with, as what it has in a head's
    cache is of no use to another. Raises ConfigError for heads of different shapes.
    """

    def __init__(self, heads: Mapping[str, DraftMethod]) -> None:
        first_name, first = next(iter(heads.items()))
        for name, head in heads.items():
            own = dataclasses.replace(first.info, model=head.info.model, version=head.info.version)
            if head.info != own:
                raise ConfigError(
                    f"draft-model: {name} has the shape {head.info}, {first_name} has {own}", param="draft_model"
                )
        self.heads = dict(heads)
        self._choice = HeadChoice(tuple(heads))
        self._bound: dict[int, _Bound] = {}
        self._served = {name: DraftHead(name) for name in heads}

    @property
    def info(self) -> DraftMethodInfo:
        infos = {name: head.info for name, head in self.heads.items()}
        return dataclasses.replace(
            next(iter(infos.values())),
            model=",".join(f"{name}={info.model}" for name, info in infos.items()),
            version=max(info.version for info in infos.values()),
            heads=tuple(
                dataclasses.replace(self._served[name], model=info.model, version=info.version)
                for name, info in infos.items()
            ),
        )

    @property
    def grammars(self) -> GrammarCompiler | None:
        return next(iter(self.heads.values())).grammars

    def open(self, session: DraftSession) -> None:
        name = self._choice.choose(session.spec)
        self._bound[id(session)] = _Bound(name)
        self.heads[name].open(session)

    def advance(self, session: DraftSession) -> bool:
        return self.heads[self._bound[id(session)].head].advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        members: dict[str, list[DraftSession]] = {}
        for session in sessions:
            bound = self._bound[id(session)]
            bound.settle(session)
            members.setdefault(bound.head, []).append(session)
        proposals: dict[int, Proposal] = {}
        for name, group in members.items():
            try:
                drafted = self.heads[name].propose(group)
            except Exception:
                log.warning("the head %s failed and drafts for no new session", name)
                self._choice.drop(name)
                raise
            for session, proposal in zip(group, drafted, strict=True):
                proposals[id(session)] = proposal
                self._bound[id(session)].asked = proposal if proposal.token_ids else None
        return [proposals[id(session)] for session in sessions]

    def close(self, session: DraftSession) -> None:
        bound = self._bound.pop(id(session), None)
        if bound is None:
            return
        bound.settle(session)
        self._choice.observe(session.spec, bound.head, bound.num_accepted, bound.num_wrong)
        served = self._served[bound.head]
        self._served[bound.head] = dataclasses.replace(
            served,
            num_sessions=served.num_sessions + 1,
            num_drafts=served.num_drafts + bound.num_drafts,
            num_accepted_tokens=served.num_accepted_tokens + bound.num_accepted,
        )
        self.heads[bound.head].close(session)


def _agreed(proposal: Proposal, committed: Sequence[int]) -> tuple[int, int]:
    """Returns how many tokens of the draft were committed, and the draft's depth."""
    token_ids, parents = proposal.token_ids, proposal.parents
    if not parents:
        return common_prefix_len(token_ids, committed), len(token_ids)
    depths: list[int] = []
    agreed: list[bool] = []
    for node, parent in enumerate(parents):
        depth = depths[parent] + 1 if parent >= 0 else 0
        follows = parent < 0 or agreed[parent]
        depths.append(depth)
        agreed.append(follows and depth < len(committed) and token_ids[node] == committed[depth])
    return max((depth + 1 for depth, found in zip(depths, agreed, strict=True) if found), default=0), max(depths) + 1


class DraftHeadMetrics(Collector):
    """What each of several heads brought to the sessions that have ended with it."""

    def __init__(self, registry: CollectorRegistry, methods: Mapping[str, DraftMethod] | None = None) -> None:
        self._methods = methods or {}
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        heads = [(name, head) for name, method in self._methods.items() for head in method.info.heads]
        for metric, text, field in (
            ("sessions", "Ended sessions that a head drafted for.", "num_sessions"),
            ("drafts", "A head's drafts.", "num_drafts"),
            ("accepted_tokens", "Tokens of a head's drafts that were accepted.", "num_accepted_tokens"),
        ):
            family = CounterMetricFamily(f"outrider:draft_head_{metric}", text, labels=("method", "head"))
            for method, head in heads:
                family.add_metric((method, head.name), getattr(head, field))
            yield family
