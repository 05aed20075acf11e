"""One caller's new grammars do not keep another's waiting."""

from __future__ import annotations

import asyncio

from outrider.gateway.admission.grammar_turns import GrammarTurns
from outrider.shared.sampling_params import Grammar, GrammarKind


def _grammar(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, "a" * number)


async def test_a_third_new_grammar_of_one_owner_waits_and_another_owners_does_not() -> None:
    turns = GrammarTurns()
    held = [await turns.take("greedy", _grammar(number)) for number in (1, 2)]
    third = asyncio.create_task(turns.take("greedy", _grammar(3)))
    (await turns.take("other", _grammar(4))).end(decoded=False)
    (await turns.take("greedy", None)).end(decoded=False)
    assert not third.done()
    held[0].end(decoded=False)
    held[0].end(decoded=False)  # gives back one place, not two
    await third
    fourth = asyncio.create_task(turns.take("greedy", _grammar(5)))
    await asyncio.sleep(0)
    assert not fourth.done()
    fourth.cancel()


async def test_grammars_that_were_decoded_by_do_not_wait() -> None:
    turns = GrammarTurns()
    (await turns.take("one", _grammar(1))).end(decoded=True)
    for number in (2, 3):
        await turns.take("one", _grammar(number))
    await turns.take("one", _grammar(1))
