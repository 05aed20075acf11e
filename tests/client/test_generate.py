"""The Python client against gateways that refuse, vanish and come back: scripted ones behind real gRPC sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from scripted_gateway import NUM_TOKENS, Gateway, Log, nobodys_address, serving
from typer.testing import CliRunner

from outrider.client.api.session import MAX_FRUITLESS_ATTEMPTS
from outrider.client.cli.app import app
from outrider.client.generate import CompletionRequest, StreamedToken, StreamEnd, stream_completion
from outrider.shared.errors import InvalidRequest, OutriderError, Unavailable
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb

REQUEST = CompletionRequest("hello", max_tokens=NUM_TOKENS)
PREDICTION = "def area(shape):\n    return shape.width\n\u00e9\n"


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def nobody() -> str:
    return nobodys_address()


def listen(log: Log, *addresses: str) -> list[StreamedToken | StreamEnd]:
    """All items of a stream; what they tell, the gateways know to be heard."""
    stream = stream_completion(addresses, REQUEST)
    return list(log.heard(stream, lambda item: isinstance(item, StreamedToken)))


def check_whole(items: list[StreamedToken | StreamEnd], least_resumes: int) -> None:
    *tokens, end = items
    assert [token.token_id for token in tokens if isinstance(token, StreamedToken)] == list(range(NUM_TOKENS))
    assert isinstance(end, StreamEnd)
    assert end.finish_reason == "length"
    assert least_resumes <= end.num_resumes <= 2 * least_resumes


def test_a_quiet_stream(log: Log) -> None:
    gateway = Gateway(log)
    with serving(gateway) as address:
        check_whole(list(stream_completion(address, REQUEST)), 0)
    assert gateway.calls == ["generate"]


def test_a_lost_connection_goes_on_at_the_next_address(log: Log) -> None:
    dies, stays = Gateway(log, dies_after=4), Gateway(log)
    with serving(dies) as first, serving(stays) as second:
        check_whole(listen(log, first, second), 1)
    assert dies.calls == ["generate"]
    assert stays.calls == ["resume 4"]


def test_one_address_is_asked_again(log: Log) -> None:
    """As long as it brings something new each time."""
    dies = Gateway(log, dies_after=2)
    with serving(dies) as address:
        check_whole(listen(log, address), 5)
    assert dies.calls == ["generate", *(f"resume {base_len}" for base_len in range(2, NUM_TOKENS, 2))]


def test_addresses_where_nobody_listens_are_passed_over(log: Log, nobody: str) -> None:
    gateway = Gateway(log)
    with serving(gateway) as address:
        check_whole(list(stream_completion(f"{nobody}, {address}", REQUEST)), 1)
    assert gateway.calls == ["resume 0", "generate"]


def test_a_gateway_that_died_before_it_had_written_anything_down(log: Log) -> None:
    forgets, stays = Gateway(log, dies_after=0, forgets=True), Gateway(log)
    with serving(forgets) as first, serving(stays) as second:
        check_whole(list(stream_completion([first, second], REQUEST)), 1)
    assert stays.calls == ["resume 0", "generate"]


def test_a_gateway_that_wrote_it_down_at_the_last_moment(log: Log) -> None:
    """Unknown when it is asked for, there when it is sent again."""

    class Late(Gateway):
        def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            try:
                yield from super().Resume(request, context)
            finally:
                log.begun.add(request.request_id)

    forgets, late = Gateway(log, dies_after=0, forgets=True), Late(log)
    with serving(forgets) as first, serving(late) as second:
        check_whole(list(stream_completion([first, second], REQUEST)), 1)
    assert late.calls == ["resume 0", "generate", "resume 0"]


@pytest.mark.parametrize("epoch", [0, 5], ids=["older-gateway", "named"])
def test_a_resumption_names_the_session_of_the_last_token(log: Log, epoch: int) -> None:
    heard: list[int | None] = []

    class Names(Gateway):
        def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            heard.append(request.epoch if request.HasField("epoch") else None)
            yield from super().Resume(request, context)

        def replies(self, base_len: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            for reply in super().replies(base_len, context):
                reply.epoch = epoch and epoch + reply.base_len
                yield reply

    with serving(Names(log, dies_at=4)) as first, serving(Names(log)) as second:
        check_whole(listen(log, first, second), 1)
    assert heard == [epoch + 2 if epoch else None]


def test_nobody_at_all_is_an_error_at_once(nobody: str) -> None:
    with pytest.raises(Unavailable, match="0 tokens were received"):
        list(stream_completion(nobody, REQUEST))
    with pytest.raises(InvalidRequest):
        list(stream_completion([], REQUEST))


def test_attempts_without_a_new_token_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.client.api.session.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("outrider.client.api.session.LONGEST_PAUSE_S", 0.002)
    stuck = Gateway(log, dies_at=6)
    with serving(stuck) as address, pytest.raises(Unavailable, match=r"Socket closed \(6 tokens were received\)"):
        listen(log, address)
    assert stuck.calls[-MAX_FRUITLESS_ATTEMPTS:] == ["resume 6"] * MAX_FRUITLESS_ATTEMPTS
    assert len(stuck.calls) == 1 + MAX_FRUITLESS_ATTEMPTS


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.ABORTED, OutriderError),
        (grpc.StatusCode.NOT_FOUND, OutriderError),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
    ],
)
def test_refusals_are_not_asked_again(log: Log, code: grpc.StatusCode, kind: type[OutriderError]) -> None:
    class Refuses(Gateway):
        def replies(self, base_len: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            yield pb.GenerateReply(base_len=0, token_ids=[0], token_texts=["0"], origins=[common.TOKEN_ORIGIN_TARGET])
            context.abort(code, "no")

    gateway = Refuses(log)
    with serving(gateway) as address, pytest.raises(kind, match="no"):
        list(stream_completion([address, address], REQUEST))
    assert gateway.calls == ["generate"]


def test_a_gap_is_an_error(log: Log) -> None:
    class Skips(Gateway):
        def replies(self, base_len: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            yield pb.GenerateReply(base_len=1, token_ids=[1], token_texts=["1"], origins=[common.TOKEN_ORIGIN_TARGET])

    with serving(Skips(log)) as address, pytest.raises(OutriderError, match="expected output token 0, got 1"):
        list(stream_completion(address, REQUEST))


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_prediction_travels_with_the_request(command: str, tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text(PREDICTION, encoding="utf-8")
    gateway = Gateway(Log())
    with serving(gateway) as address:
        for options in (["--prediction", str(file)], []):
            done = CliRunner().invoke(app, [command, "Rename it.", "--address", address, "--json", *options])
            assert done.exit_code == 0, done.output
    assert gateway.predictions == [PREDICTION, ""]


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_prediction_that_is_no_text_is_refused(command: str, tmp_path: Path) -> None:
    binary = tmp_path / "shapes.pyc"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "is not UTF-8 text"),
    ):
        done = CliRunner().invoke(app, [command, "Rename it.", "--address", "127.0.0.1:1", "--prediction", str(path)])
        assert done.exit_code == 2
        assert f"--prediction: {path}" in done.stderr
        assert said in done.stderr
