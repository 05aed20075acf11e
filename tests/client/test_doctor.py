"""`outrider doctor`: what it says of sound and of broken parts, each of them real."""

from __future__ import annotations

import json
import shutil
import socket
from importlib import metadata
from pathlib import Path

import pytest
import redis
from command import ROOT, outrider
from packaging.requirements import Requirement

from outrider.client.doctor.check import Check
from outrider.client.doctor.checkpoints import check_checkpoints
from outrider.client.doctor.machine import check_disk, check_memory, check_port
from outrider.client.doctor.packages import _package, check_packages
from outrider.client.doctor.redis_server import check_redis
from outrider.client.stack.commands import StackState
from outrider.shared.machine.memory import available_memory_bytes
from tests.ports import nobodys_port, server_port
from tests.redis_server import RedisServer

TARGET, DRAFT = (str(ROOT / "models" / name) for name in ("demo-target", "demo-draft"))
HEAD = str(ROOT / "models" / "demo-eagle3")


def levels(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def test_all_is_well_here(tmp_path: Path) -> None:
    """With the certificate: the one run that loads a model."""
    ports = ("--port", str(server_port()), "--grpc-port", str(server_port()), "--run-dir", str(tmp_path / "run"))
    done = outrider("doctor", "--json", "--model", TARGET, "--draft-model", f"{DRAFT},{HEAD}", *ports)
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    failed = [check for check in found.values() if check["level"] == "fail"]
    assert (done.returncode, failed) == (0, []), done.stderr
    assert "row invariance holds" in found["exact mode"]["found"]
    assert found[f"draft {HEAD}"]["found"] == "recognised as eagle3"
    assert found[f"draft {DRAFT}"]["found"] == "recognised as draft_model"
    assert {
        "python",
        "packages",
        "redis",
        "clock",
        "disk",
        "memory",
        "cpu",
        "gpu",
        "tokenizer of demo-draft",
    } <= found.keys()
    assert not (tmp_path / "run").exists(), "it changes nothing"


def test_what_fails_is_said_with_advice(stack: StackState, run_dir_of_stack: Path, tmp_path: Path) -> None:
    """Beside a running stack, whose Redis and ports it knows; a draft of no known kind."""
    head = tmp_path / "odd-head"
    shutil.copytree(HEAD, head)
    (head / "config.json").write_text('{"architectures": ["DFlash2Model"]}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = ("--port", str(taken.getsockname()[1]), "--grpc-port", stack.grpc_address.split(":")[1])
        folders = ("--run-dir", str(run_dir_of_stack), "--model", TARGET, "--draft-model", str(head))
        done = outrider("doctor", "--no-certificate", *folders, *ports)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    busy = taken_port(lines)
    assert f"fail  port {busy}: --port: cannot listen on 127.0.0.1:{busy}: Address already in use" in lines
    assert "      -> stop the program that listens there, or give another port" in lines
    assert any("the running stack's" in line for line in lines)
    assert "ok    redis keeps: append-only file is on" in lines
    assert any(line.startswith(f"fail  draft {head}") and "dflash2" in line for line in lines)
    assert lines[-1].endswith("2 failed, 0 warnings")


def taken_port(lines: list[str]) -> str:
    [port] = [line.split()[2].rstrip(":") for line in lines if line.startswith("fail  port")]
    return port


def test_wrong_usage() -> None:
    assert outrider("doctor", "--device", "abacus").returncode == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "truncated"),
        ("text", "not a safetensors file"),
        ("gone", "neither *.safetensors nor pytorch_model*.bin"),
        ("no archive", "is truncated, or not a file of PyTorch's"),
        ("config", "not JSON"),
    ],
)
def test_a_damaged_checkpoint(tmp_path: Path, damage: str, words: str) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT, folder)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "text":
        weights.write_text("version https://git-lfs.github.com/spec/v1")
    elif damage == "gone":
        weights.rename(folder / "weights.bin")
    elif damage == "no archive":
        weights.rename(folder / "pytorch_model.bin")
    else:
        (folder / "config.json").write_text("{")
    [problem] = [check for check in check_checkpoints(TARGET, [str(folder)]) if check.level == "fail"]
    assert words in problem.found
    assert "--draft-model" in problem.advice


def test_tokenizers_are_compared_by_their_entries(tmp_path: Path) -> None:
    assert levels(list(check_checkpoints(TARGET, [DRAFT, HEAD])))["tokenizer of demo-draft"] == "ok"
    folder = tmp_path / "other"
    shutil.copytree(DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["version"] = "another text, the same entries"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert levels(list(check_checkpoints(TARGET, [str(folder)])))["tokenizer of other"] == "ok"
    tokenizer["model"]["vocab"]["a new one"] = 4096
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert levels(list(check_checkpoints(TARGET, [str(folder)])))["tokenizer of other"] == "warn"
    (folder / "tokenizer.json").unlink()
    assert levels(list(check_checkpoints(str(folder), [])))["tokenizer"] == "fail"


def test_redis_that_keeps_and_does_not_evict(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert set(levels(list(check_redis(server.url))).values()) == {"ok"}
        with redis.Redis.from_url(server.url) as client:
            client.config_set("appendonly", "no")
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        found = levels(list(check_redis(server.url)))
    assert (found["redis keeps"], found["redis memory"], found["clock"]) == ("warn", "fail", "ok")


def test_redis_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    [check] = check_redis(f"redis://:secret@127.0.0.1:{nobodys_port()}/0")
    assert check.level == "fail"
    assert "secret" not in check.found
    [check] = check_redis("http://nonsense")
    assert check.level == "fail"
    monkeypatch.setenv("PATH", "/nowhere")
    [check] = check_redis("")
    assert (check.level, "apt-get install redis-server" in check.advice) == ("fail", True)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_port("127.0.0.1", port, "--port", False).level == "fail"
        assert check_port("127.0.0.1", port, "--port", True).level == "ok"
    assert check_port("127.0.0.1", port, "--port", False).level == "ok"


def test_memory_and_disk(tmp_path: Path) -> None:
    available = available_memory_bytes()
    assert available is not None
    assert 2**20 < available < 2**50
    [enough] = check_memory([TARGET], 1, False)
    assert "weights 16" in enough.found
    [too_much] = check_memory([TARGET], 10**9, False)
    assert too_much.level == "fail"
    assert "--kv-cache-mb" in too_much.advice
    assert check_disk(tmp_path / "not" / "there" / "yet").found.endswith(f"in {tmp_path}")


def test_packages() -> None:
    assert set(levels(list(check_packages())).values()) <= {"ok", "warn"}
    rich = metadata.version("rich")
    assert _package(Requirement("rich"), True) is None
    assert _package(Requirement("rich<1"), True) == Check(
        "package rich", "fail", f"{rich}, not <1", "pip install 'rich<1'"
    )
    other = _package(Requirement("rich<1"), False)
    assert other is not None
    assert other.level == "warn"
    missing = _package(Requirement("no-such-distribution-1"), True)
    assert missing is not None
    assert missing.level == "fail"
    assert _package(Requirement("no-such-distribution-1"), False) is None
