"""The real service with `--tensor-parallel-size 2`: exact mode and sessions as ever, and an end without a hang."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import torch

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.gateway.fleet.remote import RemoteVerifier
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear.int8 import cpu_lines
from outrider.shared import wire
from outrider.shared.errors import VerifierLost
from outrider.shared.messages import Commit, HiddenStates, HiddenStatesRequest, SessionSpec, VerifierInfo, VerifyStep
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from tests.engine.model.quantised.packed_writers import CASES, write_model
from tests.verifier_service.drafts import faulty_draft, oracle_draft, random_draft, tree_draft
from tests.verifier_service.engine_client import PARAMS, Draft, Session, make_spec, prompt_of, running_engine, tokens_of

pytestmark = pytest.mark.storm

START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    def ranks(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"multiprocessing.spawn" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


@contextmanager
def running_service(checkpoint: Path, directory: Path, dtype: str = "float32") -> Iterator[Service]:
    log_path = directory / "verifier.log"
    command = ["outrider.verifier_service", "--model", str(checkpoint), "--dtype", dtype, "--port", "0"]
    command += ["--tensor-parallel-size", "2", "--kv-cache-mb", "4", "--block-size", "4"]
    with log_path.open("wb") as log_file:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=log_file, stderr=subprocess.STDOUT)
    try:
        _wait(lambda: b"serving on" in log_path.read_bytes() or process.poll() is not None, START_TIMEOUT_S, "serving")
        match = re.search(r"serving on (\S+)", log_path.read_text())
        assert match, log_path.read_text()
        yield Service(process, match.group(1), log_path)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(checkpoint, tmp_path_factory.mktemp("tensor-parallel")) as running:
        yield running


@pytest.fixture(scope="module")
def packed_service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Of the same model with weights of four bits, which stay packed on a CPU that has kernels for them."""
    directory = tmp_path_factory.mktemp("packed")
    write_model(checkpoint, CASES["ct-w4a16"], directory / "packed", directory / "meant")
    with running_service(directory / "packed", directory, "bfloat16") as running:
        yield running


async def generate(
    address: str, spec: SessionSpec, draft: Draft | None = None, hidden: HiddenStatesRequest | None = None
) -> list[Commit]:
    commits: list[Commit] = []
    output: tuple[int, ...] = ()
    async with grpc.aio.insecure_channel(address) as channel:
        verifier = RemoteVerifier(channel, address)
        await verifier.open(spec)
        while not commits or commits[-1].finish_reason is None:
            proposal = draft(output) if draft else None
            async for commit in verifier.verify(VerifyStep(spec.epoch, len(output), proposal, 0, hidden)):
                output += commit.token_ids
                commits.append(commit)
        await verifier.close()
    return commits


async def info_of(service: Service) -> VerifierInfo:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        return wire.verifier_info_from_wire(await stub.GetInfo(verifier_pb2.GetVerifierInfoRequest()))


@pytest.mark.parametrize("name", ["service", "packed_service"])
async def test_the_certificate_holds(name: str, request: pytest.FixtureRequest) -> None:
    info = await info_of(request.getfixturevalue(name))
    assert info.certificate.holds
    assert len(info.certificate.checks) > 0
    assert all(check.holds for check in info.certificate.checks)


@pytest.mark.parametrize("name", ["greedy", "greedy with penalties"])
async def test_greedy_text_is_that_of_one_process(service: Service, truth: Callable[..., list], name: str) -> None:
    assert tokens_of(await generate(service.address, make_spec(prompt_of(0), PARAMS[name]))) == tokens_of(
        truth(name, 0)
    )


@pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
async def test_quantised_weights_stay_packed(packed_service: Service) -> None:
    numerics = (await info_of(packed_service)).numerics
    kind = "i4" if cpu_lines.instruction() is None else "w4a8"
    assert numerics.startswith(f"bfloat16+{kind}/cpu/")
    assert "/tp2/" in numerics


@pytest.mark.parametrize("name", ["greedy", "sampled", "hot"])
@pytest.mark.parametrize("of", ["service", "packed_service"])
async def test_drafts_and_company_change_nothing(of: str, name: str, request: pytest.FixtureRequest) -> None:
    """Alone and plain, then with drafts of every quality at once: the same tokens and, to the bit, logprobs."""
    service: Service = request.getfixturevalue(of)
    spec = make_spec(prompt_of(1), PARAMS[name])
    plain = await generate(service.address, spec)
    expected = tokens_of(plain)
    drafts = [oracle_draft(expected), random_draft(5), faulty_draft(expected, 6), tree_draft(expected, 7), None]
    runs = await asyncio.gather(*(generate(service.address, spec, draft) for draft in drafts))
    for commits in runs:
        assert tokens_of(commits) == expected
        assert [entry for commit in commits for entry in commit.logprobs] == [
            entry for commit in plain for entry in commit.logprobs
        ]
    assert sum(commit.num_accepted_tokens for commit in runs[0]) > 0
    assert sum(commit.num_accepted_tokens for commit in runs[3]) > 0


async def test_hidden_states_are_whole(service: Service, loaded: LoadedModel, certificate: Certificate) -> None:
    """What a drafter gets is the sum over ranks, in every layer that it asks for."""
    request = HiddenStatesRequest(layers=(1, 2), first_index=-37)
    spec = make_spec(prompt_of(2), PARAMS["greedy"])
    with running_engine(loaded, certificate) as engine, Session(engine, spec) as session:
        expected = session.step(0, hidden=request)[0].hidden_states
    found = (await generate(service.address, spec, hidden=request))[0].hidden_states
    assert expected is not None
    assert found is not None
    assert (found.num_rows, found.width) == (expected.num_rows, expected.width)
    np.testing.assert_allclose(_rows(found), _rows(expected), rtol=1e-4, atol=1e-5)


def _rows(states: HiddenStates) -> np.ndarray:
    return np.frombuffer(states.data, dtype=np.float32)


async def _verify_forever(verifier: RemoteVerifier, spec: SessionSpec) -> None:
    while True:
        async for _commit in verifier.verify(VerifyStep(spec.epoch, 1, None, 0)):
            pass


async def test_a_dead_rank_ends_the_service(checkpoint: Path, tmp_path: Path) -> None:
    with running_service(checkpoint, tmp_path) as service:
        (rank,) = service.ranks()
        spec = make_spec(prompt_of(0), PARAMS["greedy"])
        async with grpc.aio.insecure_channel(service.address) as channel:
            verifier = RemoteVerifier(channel, service.address)
            await verifier.open(spec)
            _ = [commit async for commit in verifier.verify(VerifyStep(spec.epoch, 0, None, 0))]
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(VerifierLost):
                await _verify_forever(verifier, spec)
        assert service.process.wait(END_TIMEOUT_S) == 1
        assert "tensor-parallel rank 1 has died (exit code -9)" in service.log_path.read_text()


def test_sigterm_ends_every_rank(checkpoint: Path, tmp_path: Path) -> None:
    with running_service(checkpoint, tmp_path) as service:
        (rank,) = service.ranks()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(END_TIMEOUT_S) == 0
        _wait(lambda: not Path(f"/proc/{rank}").exists(), END_TIMEOUT_S, "rank 1 has ended")
        assert "Traceback" not in service.log_path.read_text()


def test_no_rank_outlives_rank_0(service: Service) -> None:
    """The last test: it ends the service of the others."""
    (rank,) = service.ranks()
    service.process.kill()
    service.process.wait()
    _wait(lambda: not Path(f"/proc/{rank}").exists(), END_TIMEOUT_S, "rank 1 has ended")
