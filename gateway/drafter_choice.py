"""Which drafter a session gets: the least loaded one that serves a wanted method and fits the target.

Not here: how many tokens it is asked for (draft_policy) and the session's side of the conversation (drafting).
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.drafter_line import Lease
from gateway.pool import Member, Pool
from gateway.remote import RemoteDrafter
from gateway.requests import METHOD_AUTO
from shared.messages import DrafterInfo, DraftMethodInfo, VerifierInfo
from shared.tracing import Carrier

# Which method `auto` takes first when several are served: the one that is right most often. What they cost and bring is
# measured from then on (adaptive_draft).
AUTO_ORDER = ("eagle3", "eagle", "draft_model", "mlp_speculator", "medusa", "suffix", "ngram")


def acquire_drafter(
    wanted: str,
    drafters: Pool[DrafterInfo],
    target: VerifierInfo | None,
    metadata: Carrier = (),
    *,
    besides: str = "",
) -> Lease | None:
    """A place at a drafter for the method `wanted` (or "auto"); None when nobody offers one now.

    metadata: of the stream that will be opened. besides: an address that will not do.
    """
    methods = AUTO_ORDER if wanted == METHOD_AUTO else (wanted,)
    members = [member for member in drafters.healthy() if member.address != besides]
    for name in methods:
        for member in members:
            method = _fitting_method(member.info, name, target)
            if method is not None:
                member.num_sessions += 1
                drafter = RemoteDrafter(member.channel, member.address, metadata)
                return Lease(drafter, method, _releaser(member), member.address)
    return None


def offered_methods(drafters: Pool[DrafterInfo], target: VerifierInfo | None, *, token_tree: bool) -> dict[str, int]:
    """Methods that somebody has a place for now, the verifier itself among them, in the order of AUTO_ORDER, each with
    its `draft_limit`; where the drafters of a method differ, that of the one that drafts least.
    """
    infos = [member.info for member in drafters.healthy()]
    local = target.local_methods if target is not None else ()
    offered = {}
    for name in AUTO_ORDER:
        methods = [method for info in infos if (method := _fitting_method(info, name, target)) is not None]
        methods += [method for method in local if method.name == name]
        if methods:
            limits = [draft_limit(method, token_tree=token_tree) for method in methods]
            offered[name] = min((limit for limit in limits if limit), default=0)
    return offered


def draft_limit(method: DraftMethodInfo, *, token_tree: bool) -> int:
    """The most tokens that it drafts, however many are asked for; 0: no limit known. A tree may have more tokens than
    that: only its depth is limited.
    """
    return 0 if token_tree and method.proposes_trees else method.max_num_draft_tokens


def _fitting_method(info: DrafterInfo | None, name: str, target: VerifierInfo | None) -> DraftMethodInfo | None:
    if info is None or info.num_sessions >= info.max_sessions:
        return None
    method = next((method for method in info.methods if method.name == name), None)
    if method is None or target is None:
        return method
    return method if fits(method, target) else None


def fits(method: DraftMethodInfo, target: VerifierInfo) -> bool:
    """Same token ids, and every hidden state it wants is one that the target has."""
    return method.fits(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_hidden_layers=target.num_hidden_layers
    )


def _releaser(member: Member[DrafterInfo]) -> Callable[[], None]:
    def release() -> None:
        member.num_sessions -= 1

    return release
