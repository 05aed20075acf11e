"""The Python client and a gateway that is killed, frozen or restarted under it: the stream goes on by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from e2e_gateways import Fleet, Gateway

from outrider.client import AsyncOutriderClient, Completion, SamplingParams, Speculation
from outrider.client.generate import CompletionRequest, StreamedToken, StreamEnd, stream_completion

pytestmark = pytest.mark.storm

PROMPT = '''def read_lines(path):
    """Return the lines of a text file as a list."""'''
NUM_TOKENS = 320
CUT_AFTER = 30
REQUEST = CompletionRequest(
    PROMPT,
    max_tokens=NUM_TOKENS,
    temperature=0.7,
    seed=3,
    method="draft_model",
    num_speculative_tokens=3,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def fleet(lasting_fleet: Fleet) -> Iterator[Fleet]:
    yield lasting_fleet
    lasting_fleet.close()


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> tuple[list[int], str, StreamEnd]:
    quiet = CompletionRequest(**{**vars(REQUEST), "method": "off"})
    told = streamed([fleet.state.grpc_address], quiet, lambda _num_tokens: None)
    assert len(told[0]) == NUM_TOKENS
    return told


def streamed(
    addresses: list[str], request: CompletionRequest, incident: Callable[[int], None]
) -> tuple[list[int], str, StreamEnd]:
    tokens: list[StreamedToken] = []
    for item in stream_completion(addresses, request):
        if isinstance(item, StreamEnd):
            return [token.token_id for token in tokens], "".join(token.text for token in tokens), item
        tokens.append(item)
        incident(len(tokens))
    raise AssertionError("the stream had no end")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_another_gateway_goes_on(
    fleet: Fleet, undisturbed: tuple[list[int], str, StreamEnd], signum: signal.Signals
) -> None:
    """One that is frozen is noticed by the connection's keepalive, after 15 s at most."""
    gateway = fleet.gateway()

    def incident(num_tokens: int) -> None:
        if num_tokens == CUT_AFTER:
            gateway.process.send_signal(signum)

    token_ids, text, end = streamed([gateway.grpc_address, fleet.state.grpc_address], REQUEST, incident)
    assert (token_ids, text) == undisturbed[:2]
    assert end.num_resumes >= 1
    assert (end.finish_reason, end.completion_tokens) == (undisturbed[2].finish_reason, len(token_ids))


async def test_another_gateway_goes_on_for_the_asyncio_client(
    fleet: Fleet, undisturbed: tuple[list[int], str, StreamEnd]
) -> None:
    """Text, tokens and their log-probabilities are those of a stream that nothing happened to."""
    gateway = fleet.gateway()
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.7,
        seed=3,
        ignore_eos=True,
        logprobs=1,
        speculation=Speculation(method="draft_model", num_speculative_tokens=3),
    )

    async def completion(addresses: list[str], cut_after: int) -> Completion:
        num_tokens = 0
        async with AsyncOutriderClient(addresses) as client:
            async for update in client.stream(PROMPT, params):
                if num_tokens < cut_after <= num_tokens + len(update.tokens):
                    gateway.process.send_signal(signal.SIGKILL)
                num_tokens += len(update.tokens)
        assert update.completion is not None
        return update.completion

    quiet = await completion([fleet.state.grpc_address], 2 * NUM_TOKENS)
    cut = await completion([gateway.grpc_address, fleet.state.grpc_address], CUT_AFTER)
    assert (list(cut.token_ids), "".join(token.text for token in cut.tokens)) == undisturbed[:2]
    assert (cut.text, [token.logprob for token in cut.tokens]) == (
        quiet.text,
        [token.logprob for token in quiet.tokens],
    )
    assert quiet.num_resumes == 0
    assert cut.num_resumes >= 1


def test_the_same_address_goes_on_once_a_gateway_is_there_again(
    fleet: Fleet, undisturbed: tuple[list[int], str, StreamEnd]
) -> None:
    gateways: list[Gateway] = [fleet.gateway()]
    address = gateways[0].grpc_address

    def incident(num_tokens: int) -> None:
        if num_tokens == CUT_AFTER:
            gateways[0].kill()
            gateways.append(fleet.gateway(grpc_port=address.rpartition(":")[2]))

    token_ids, text, end = streamed([address], REQUEST, incident)
    assert (token_ids, text) == undisturbed[:2]
    assert end.num_resumes >= 1
