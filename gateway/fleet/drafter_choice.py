"""Chooses a session's drafter: the least loaded one that serves a wanted method and fits the target.

Not here: the number of draft tokens (verifier_service/draft_length) and the session's connection to it
(drafter_connection).
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.fleet.remote import RemoteDrafter
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.request.types import METHOD_AUTO
from outrider.shared.draft_policy.draft_methods import DRAFT_METHODS
from outrider.shared.messages import DrafterInfo, DrafterOffer, DraftMethodInfo, VerifierInfo
from outrider.shared.tracing import Carrier

# Order in which `auto` first tries methods: by typical acceptance. From then on it measures them.
AUTO_ORDER = DRAFT_METHODS


def acquire_drafter(
    wanted: str,
    drafters: Pool[DrafterInfo],
    target: VerifierInfo | None,
    metadata: Carrier = (),
) -> Lease | None:
    """Takes a session slot at a drafter for the method `wanted` (or "auto"); None if no drafter has one.

    metadata: for the stream that will be opened.
    """
    methods = AUTO_ORDER if wanted == METHOD_AUTO else (wanted,)
    for name in methods:
        for member in drafters.healthy():
            method = _fitting_method(member.info, name, target)
            if method is not None:
                member.num_sessions += 1
                drafter = RemoteDrafter(member.channel, member.address, metadata)
                return Lease(drafter, method, _releaser(member), member.address)
    return None


def drafter_offers(
    drafters: Pool[DrafterInfo], target: VerifierInfo | None, *, token_tree: bool
) -> tuple[DrafterOffer, ...]:
    """Methods available now at drafters with a free session slot, in AUTO_ORDER, each with its smallest limit."""
    infos = [member.info for member in drafters.healthy()]
    offers = []
    for name in AUTO_ORDER if infos else ():
        methods = [method for info in infos if (method := _fitting_method(info, name, target)) is not None]
        if methods:
            limits = [method.limit(token_tree=token_tree) for method in methods]
            offers.append(DrafterOffer(name, min((limit for limit in limits if limit), default=0)))
    return tuple(offers)


def is_served(name: str, verifiers: Pool[VerifierInfo], drafters: Pool[DrafterInfo]) -> bool:
    """Returns whether a healthy drafter or verifier has the method, busy or not."""
    targets = [member.info for member in verifiers.healthy() if member.info is not None]
    remote = [method for member in drafters.healthy() if member.info is not None for method in member.info.methods]
    return any(
        any(method.name == name for method in target.local_methods)
        or any(method.name == name and fits(method, target) for method in remote)
        for target in targets
    )


def _fitting_method(info: DrafterInfo | None, name: str, target: VerifierInfo | None) -> DraftMethodInfo | None:
    if info is None or info.num_sessions >= info.max_sessions:
        return None
    method = next((method for method in info.methods if method.name == name), None)
    if method is None or target is None:
        return method
    return method if fits(method, target) else None


def fits(method: DraftMethodInfo, target: VerifierInfo) -> bool:
    """Returns whether token ids are the same and the target has the hidden states that the method needs."""
    return method.fits(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_hidden_layers=target.num_hidden_layers
    )


def _releaser(member: Member[DrafterInfo]) -> Callable[[], None]:
    def release() -> None:
        member.num_sessions -= 1

    return release
