"""`outrider reload` under load: two verifiers take the weights of two targets in turn, and no answer is of both."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from e2e_gateways import Fleet, Told, read_events
from e2e_processes import ServiceProcess, start_all, verifier_info
from e2e_rest import speculation
from e2e_stack import DEMO_TARGET, MODELS, metric_of

from outrider.client.stack.commands import StackState
from outrider.engine.model.load import load_model
from outrider.shared.messages import weights_of
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from tests.engine.tiny_models import save_tiny_model
from tests.grid.heads import save_random_head
from tests.ports import server_port
from tests.redis_server import RedisServer
from tests.verifier_service.drafting.other_weights import with_nan

pytestmark = pytest.mark.storm
OUTRIDER = str(Path(sys.executable).with_name("outrider"))
COMPLETIONS = "/v1/completions"
NUM_RELOADS = 20
NUM_CLIENTS = 3
RELOAD_TIMEOUT_S = 400.0
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    # One token is permitted, so that what is drawn can be told.
    "rejection": {"temperature": 1.0, "top_k": 1, **speculation("draft_model", annotate=True, mode="rejection")},
}


def body_of(kind: str, prompt: int) -> dict[str, Any]:
    shared = {
        "prompt": [5, 9, 301, 44, 17 + prompt],
        "max_tokens": 80 + 160 * prompt,
        "ignore_eos": True,
        "stream": True,
        "skip_special_tokens": False,
        **speculation("eagle3" if prompt else "draft_model", annotate=True),
    }
    return shared | KINDS[kind]


BODIES = {(kind, prompt): body_of(kind, prompt) for kind in KINDS for prompt in (0, 1)}


def save_target(to: Path, seed: int) -> Path:
    """A tiny one with random weights and the demo target's tokenizer."""
    demo = json.loads((DEMO_TARGET / "config.json").read_text())
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        **{name: demo[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    }
    save_tiny_model("LlamaConfig", config, to, seed)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_TARGET / name, to)
    return to


@dataclass
class Reloading:
    """Two verifiers, and a gateway. targets: two of one config; the first drafts for itself too."""

    verifiers: list[ServiceProcess]
    metrics: list[str]
    fleet: Fleet
    targets: tuple[Path, Path]
    url: str

    async def reload(self, which: int, drain_s: float) -> tuple[int, str]:
        """The exit code, and what it said."""
        return await self.reload_folder(self.targets[which], drain_s)

    async def load(self, which: int, drain_s: float) -> list[int]:
        """As the command does, without starting Python. Returns the versions."""
        request = verifier_pb2.LoadTargetRequest(path=str(self.targets[which]), drain_s=drain_s)
        versions = []
        for verifier in self.verifiers:
            async with grpc.aio.insecure_channel(verifier.address) as channel:
                stub: Any = verifier_pb2_grpc.VerifierStub(channel)
                versions.append((await stub.LoadTarget(request, timeout=RELOAD_TIMEOUT_S)).target_version)
        return versions

    async def reload_folder(self, folder: Path, drain_s: float) -> tuple[int, str]:
        addresses = ",".join(verifier.address for verifier in self.verifiers)
        words = (
            "reload",
            str(folder),
            "--verifiers",
            addresses,
            "--url",
            self.url,
            "--drain-s",
            str(drain_s),
            "--json",
        )
        process = await asyncio.create_subprocess_exec(
            OUTRIDER, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), RELOAD_TIMEOUT_S)
        return process.returncode or 0, (out or err).decode()


@pytest.fixture(scope="module")
def reloading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloading]:
    run_dir = tmp_path_factory.mktemp("reloading")
    metrics = [str(server_port()) for _ in range(2)]
    targets = save_target(run_dir / "first", 0), save_target(run_dir / "other", 1)
    head = run_dir / "eagle3"
    save_random_head("eagle3", load_model(str(targets[0])), head)
    verifiers = [
        ServiceProcess(
            "outrider.verifier_service",
            run_dir,
            *("--model", str(targets[0]), "--num-threads", "1", "--allow-target-reload", "true"),
            *("--local-draft-model", f"{head},{targets[0]}", "--local-kv-cache-mb", "16", "--metrics-port", port),
        )
        for port in metrics
    ]
    with RedisServer(run_dir) as redis:
        fleet = Fleet(StackState(verifiers=[verifier.address for verifier in verifiers]), redis, run_dir)
        try:
            start_all(verifiers)
            yield Reloading(verifiers, metrics, fleet, targets, fleet.gateway().url)
        finally:
            fleet.close()
            for verifier in verifiers:
                verifier.kill()


@pytest.fixture(scope="module")
async def http(reloading: Reloading) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=reloading.url, timeout=RELOAD_TIMEOUT_S) as client:
        yield client


Answers = dict[tuple[str, int], list[int]]


async def answers(http: httpx.AsyncClient) -> Answers:
    found: Answers = {}
    for key, body in BODIES.items():
        told = await read_events(http, "POST", COMPLETIONS, body=body)
        assert told.done, told.error
        found[key] = told.token_ids()
    return found


def is_by_name(error: dict[str, Any]) -> bool:
    return (error["param"], error["code"]) == ("weights", 503) and "send the request again" in error["message"]


@pytest.mark.timeout(900)
async def test_twenty_reloads_under_load(reloading: Reloading, http: httpx.AsyncClient) -> None:
    of_first = await answers(http)
    code, said = await reloading.reload(1, 0.0)
    assert code == 0, said
    assert [target["target_version"] for target in json.loads(said)["reloaded"]] == [2, 2]
    of_other = await answers(http)
    for key in BODIES:
        assert of_first[key] != of_other[key]
        assert len(of_first[key]) == len(of_other[key]) == BODIES[key]["max_tokens"]
    over, cut = asyncio.Event(), []
    seen: Counter[str] = Counter()

    async def client(number: int) -> None:
        keys = itertools.cycle(BODIES)
        for _ in range(2 * number):
            next(keys)
        while not over.is_set():
            key = next(keys)
            told = await read_events(http, "POST", COMPLETIONS, body=BODIES[key])
            tokens = told.token_ids()
            wholes = {"first": of_first[key], "other": of_other[key]}
            names = [name for name, whole in wholes.items() if tokens == whole[: len(tokens)]]
            assert names, f"{key}: {tokens} is of neither target"
            if told.done:
                assert len(tokens) == BODIES[key]["max_tokens"]
                seen[f"{names[0]} {key[0]}"] += 1
            else:
                assert told.error is not None
                assert is_by_name(told.error), told.error
                seen["ended by name"] += 1
                if tokens:
                    cut.append(told)

    clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
    for number in range(NUM_RELOADS):
        assert await reloading.load(number % 2, 0.0 if number % 3 == 0 else 4.0) == [number + 3] * 2
        print(number + 1, dict(seen))
    over.set()
    await asyncio.gather(*clients)
    print(dict(seen), f"{len(cut)} of them after tokens")
    for kind in KINDS:
        assert seen[f"first {kind}"] > 0
        assert seen[f"other {kind}"] > 0
    for told in cut[:3]:
        again = await read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
        assert again.error is not None or NUM_RELOADS % 2 == 0  # its weights may serve again
    for verifier, port in zip(reloading.verifiers, reloading.metrics, strict=True):
        assert (await verifier_info(verifier)).target_version == NUM_RELOADS + 2
        assert (
            metric_of(f"http://127.0.0.1:{port}", "outrider:target_reloads_total", outcome="taken") == NUM_RELOADS + 1
        )
    members = (await http.get("/fleet")).json()["verifiers"]
    assert {member["target_version"] for member in members} == {NUM_RELOADS + 2}


async def test_an_answer_that_was_cut_is_not_resumed_by_other_weights(
    reloading: Reloading, http: httpx.AsyncClient
) -> None:
    await reloading.reload(0, 0.0)
    body = BODIES["seeded", 1] | {"max_tokens": 1900} | speculation("off", annotate=True)  # 19 s at least
    started = asyncio.Event()

    def begun(told: Told) -> bool:
        if told.num_tokens() >= 20:
            started.set()
        return False

    reading = asyncio.create_task(read_events(http, "POST", COMPLETIONS, body=body, until=begun))
    await started.wait()
    code, said = await reloading.reload(1, 0.0)
    assert code == 0, said
    told = await reading
    assert told.error is not None
    assert is_by_name(told.error)
    again = await read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
    assert again.error is not None
    assert is_by_name(again.error)
    await reloading.reload(0, 0.0)
    rest = await read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
    assert rest.done, "the weights serve again"
    whole = await read_events(http, "POST", COMPLETIONS, body=body)
    assert (told + rest).token_ids() == whole.token_ids()


async def test_a_broken_folder_is_refused_and_serving_goes_on(
    reloading: Reloading, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    before = [weights_of((await verifier_info(verifier)).numerics) for verifier in reloading.verifiers]
    expected = await answers(http)
    code, said = await reloading.reload_folder(with_nan(reloading.targets[0], tmp_path / "nan"), 0.0)
    assert code == 2
    assert "not finite" in said
    code, said = await reloading.reload_folder(MODELS / "demo-draft", 0.0)
    assert code == 2
    assert "not of the served target's config" in said
    assert [weights_of((await verifier_info(verifier)).numerics) for verifier in reloading.verifiers] == before
    assert await answers(http) == expected
