"""`outrider up`, `serve` and `demo` refuse a wrong setting by name before any process is started."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from command import ROOT, outrider

from outrider.client.doctor.speculation import check_speculation
from outrider.client.doctor.start import check_before_start
from outrider.client.stack.commands import StackSettings, verifier_command
from outrider.drafting.methods.registry import plan_methods
from outrider.shared.errors import ConfigError
from tests.drafting.mtp_targets import save_mtp_target
from tests.ports import nobodys_port, server_port
from tests.redis_server import RedisServer

TARGET, DRAFT, HEAD = (str(ROOT / "models" / name) for name in ("demo-target", "demo-draft", "demo-eagle3"))
HYBRID_HEAD = str(ROOT / "models" / "demo-hybrid-eagle3")
AN_EAGLE_HEAD = '{"method": "eagle3"}'


def ports() -> tuple[str, ...]:
    return ("--port", str(server_port()), "--grpc-port", str(server_port()))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("up", "--dtype", "half"), "--dtype"),
        (("up", "--redis-url", "redis://127.0.0.1:{nobodys}/0"), "--redis-url"),
        (("up", "--draft-model", f"{HEAD},{DRAFT},{HEAD}"), f"draft {HEAD}: it is given twice; name each"),
        (("up", "-sc", AN_EAGLE_HEAD), "nothing here drafts with eagle3; there are draft_model, suffix, ngram"),
        (("up", "-sc", '{"method": "foo"}'), "method 'foo' is not one of auto, off, mtp, eagle3"),
        (("serve", TARGET, "-sc", AN_EAGLE_HEAD), "nothing here drafts with eagle3; there are suffix, ngram"),
        (("serve", TARGET, "-sc", '{"method": "mtp"}'), "method mtp needs a target with MTP layers"),
        (("serve", TARGET, "--override-generation-config", '{"top_p": 2}'), "config: top_p must be between 0 and 1"),
        (("serve", TARGET, "--generation-config", HEAD), f"{HEAD} has no generation_config.json; give auto, vllm or"),
        (("serve", TARGET, "--chat-template", "no.jinja"), "gateway: --chat-template: no.jinja: No such file"),
        (("serve", TARGET, "--tool-call-parser", "foo"), "gateway: --tool-call-parser: 'foo' is not one of auto,"),
        (("serve", TARGET, "--api-key", ""), "--api-key: a key is empty; give one, or leave the option out"),
        (("serve", TARGET, "-sc", '{"model": "{junk}"}'), "junk.gguf is no GGUF file: it does not begin with GGUF"),
        (("serve", HEAD), f"model: {HEAD} is a draft head of demo-target, not a model; serve its target"),
        (("up", "--draft-model", HYBRID_HEAD), f"{HYBRID_HEAD} is a head of demo-hybrid: its hidden_size is 160"),
        (("serve", TARGET, "--max-model-len", "4k"), "--max-model-len: 4000 is above the 2048 positions of"),
        (("serve", TARGET, "-tp", "64"), "--tensor-parallel-size: 64 ranks cannot share the 5 KV heads of"),
        (
            ("serve", TARGET, "-q", "awq"),
            f"--quantization: awq is named, and the weights of {TARGET} are not quantised",
        ),
        (("serve", TARGET, "--kv-cache-memory-bytes", "900T"), "needed: weights"),
        (("demo", "--redis-url", "redis://127.0.0.1:{nobodys}/0"), "--redis-url"),
    ],
)
def test_the_command_names_it_and_starts_nothing(tmp_path: Path, command: tuple[str, ...], said: str) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "junk.gguf").write_bytes(b"PK")
    words = [
        word.replace("{nobodys}", str(nobodys_port())).replace("{junk}", str(tmp_path / "junk.gguf"))
        for word in command
    ]
    done = outrider(*words, *ports(), "--run-dir", str(run_dir))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stdout + done.stderr
    assert said in " ".join(done.stderr.split())
    assert not run_dir.exists(), "a process has its log there"


@pytest.mark.parametrize(
    ("command", "option"), [(("up",), "--port"), (("demo",), "--grpc-port"), (("serve", TARGET), "--port")]
)
def test_a_busy_port(tmp_path: Path, command: tuple[str, ...], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        # The later one of an option that is given twice counts.
        done = outrider(*command, *ports(), option, port, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert f"{option}: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [("up",), ("serve", TARGET)])
def test_the_port_after_it_is_grpcs(tmp_path: Path, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        done = outrider(*command, "--port", str(taken - 1), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert f"--grpc-port: cannot listen on 127.0.0.1:{taken}: Address already in use" in done.stderr


def test_a_host_that_is_not_here_is_said_once(tmp_path: Path) -> None:
    settings = StackSettings(TARGET, "", host="no.such.host.invalid", port=server_port())
    with pytest.raises(ConfigError, match=r"^host: --host: no\.such\.host\.invalid is not an address [^\n]*$"):
        check_before_start(settings, tmp_path)


def test_the_gateways_environment_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS_FILE", "no-keys")
    monkeypatch.setenv("OUTRIDER_LOG_FORMAT", "json")
    settings = StackSettings(TARGET, "", port=server_port(), grpc_port=server_port())
    with pytest.raises(ConfigError, match=r"^gateway: --api-keys-file no-keys cannot be read: No such file"):
        check_before_start(settings, tmp_path)


def test_every_failed_check_is_told(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    (draft / "model.safetensors").write_bytes(b"cut")
    port = server_port()
    settings = StackSettings(TARGET, str(draft), port=port, grpc_port=port, redis_url="http://nonsense")
    with pytest.raises(ConfigError) as refused:
        check_before_start(settings, tmp_path)
    for said in ("correct --redis-url", f"--grpc-port {port} is --port already", "is not a safetensors file"):
        assert said in refused.value.message


def test_what_is_right_is_let_through(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        settings = StackSettings(
            TARGET,
            f"{DRAFT},{HEAD}",
            port=server_port(),
            grpc_port=server_port(),
            redis_url=server.url,
            speculative_config=AN_EAGLE_HEAD,
        )
        check_before_start(settings, tmp_path)


@pytest.mark.parametrize(
    ("methods", "method", "level"),
    [
        ((), "auto", "ok"),
        ((), "off", "ok"),
        ((), "ngram_gpu", "ok"),
        ((), "draft_model", "ok"),
        ((), "medusa", "fail"),
        (("suffix",), "ngram", "fail"),
        ((), "mtp", "fail"),
    ],
)
def test_the_method_is_one_that_is_started(methods: tuple[str, ...], method: str, level: str) -> None:
    settings = StackSettings(TARGET, DRAFT, methods, speculative_config=f'{{"method": "{method}"}}')
    *_, check = check_speculation(settings, [{"path": DRAFT, "kind": "draft_model"}])
    assert check.level == level
    assert level == "ok" or method in check.found


def test_mtp_needs_a_target_with_mtp_layers_and_no_other_draft(tmp_path: Path) -> None:
    target = str(save_mtp_target("glm4_moe", tmp_path / "target").folder)
    config = '{"method": "glm4_moe_mtp", "num_speculative_tokens": 3}'
    (check,) = check_speculation(StackSettings(target, "", speculative_config=config), [])
    assert (check.level, check.found) == ("ok", "mtp, of mtp, suffix, ngram")
    *_, check = check_speculation(
        StackSettings(target, DRAFT, speculative_config=config), [{"path": DRAFT, "kind": "draft_model"}]
    )
    assert (check.level, check.advice) == (
        "fail",
        'it drafts from the target\'s own files: give no other draft (--draft-model "")',
    )
    (check,) = check_speculation(StackSettings(TARGET, "", speculative_config=config), [])
    assert check.level == "fail"
    assert "method mtp needs a target with MTP layers, and none are read of model type llama" in check.found


def test_without_a_draft_a_stack_drafts_with_the_targets_mtp_layer(tmp_path: Path) -> None:
    target = save_mtp_target("glm4_moe", tmp_path / "target")
    without = {name: tensor for name, tensor in target.tensors.items() if name not in target.mtp_names}
    stripped = target.rewritten(tmp_path / "stripped", without)
    for folder, methods in ((target.folder, "mtp,suffix,ngram"), (stripped, "suffix,ngram"), (TARGET, "suffix,ngram")):
        assert verifier_command(StackSettings(str(folder), "", num_drafters=0))[-2:] == ["--local-methods", methods]
        idle = StackSettings(str(folder), "", num_drafters=0, speculative_config='{"method": "off"}')
        assert verifier_command(idle)[-1] == "suffix,ngram", "a layer that nobody uses takes memory"
        planned = plan_methods((), (), str(folder))
        assert ("mtp" in planned) == ("mtp" in methods)
