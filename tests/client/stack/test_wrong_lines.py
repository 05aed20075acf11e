"""46 wrong command lines: each ends with one line that names what is wrong, and nothing is started.

How long each took is printed (`-s`): on an idle machine none takes five seconds.
"""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, outrider

from tests.ports import nobodys_port, server_port

pytestmark = pytest.mark.storm

_STARTS = ("serve", "up", "demo")
# {nobody}: a port that nobody listens on; {busy}: one that is taken.
LINES = {
    "serv models/demo-target": "Did you mean 'serve'?",
    "serve": "MODEL: give the target: a checkpoint folder, a .gguf file or a Hub id",
    "serve no/such/folder": "--model: no/such/folder does not exist, and is no id of the Hugging Face Hub",
    "serve README.md": "--model: README.md is not a checkpoint folder (no config.json). Give the folder",
    "serve deploy": "--model: deploy is not a checkpoint folder (no config.json). Give the folder",
    "serve models/demo-eagle3": "is a draft head of demo-target, not a model; serve its target",
    "serve models/demo-target --prot 9000": "No such option: --prot (Possible options: --host, --port)",
    "serve models/demo-target --port 70000": "(env var: 'OUTRIDER_PORT'): Input should be less than or equal to",
    "serve models/demo-target --port abc": "'--port' (env var: 'OUTRIDER_PORT'): Input should be a valid integer",
    "serve models/demo-target --port {busy}": "stop the program that listens there, or give another port",
    "serve models/demo-target --host no.such.host.invalid": "is not an address of this machine",
    "serve models/demo-target --dtype int4": "--dtype: 'int4' is not one of auto, bfloat16",
    "serve models/demo-target --max-model-len 1M": "is above the 2048 positions of models/demo-target; give at most",
    "serve models/demo-target -tp 0": "'-tp': Input should be greater than or equal to 1",
    "serve models/demo-target -tp 64": "cannot share the 5 KV heads of models/demo-target; give at most 5",
    "serve models/demo-target -sc '{method: ngram}'": "--speculative-config is not JSON",
    """serve models/demo-target -sc '{"method": "ngrm"}'""": "method 'ngrm' is not one of auto, off,",
    """serve models/demo-target -sc '{"model": "./no/draft"}'""": "./no/draft does not exist",
    """serve models/demo-target -sc '{"method": "ngram", "num_speculative_tokens": -3}'""": "whole number from 1 to 32",
    "serve models/demo-target --quantization fp8": "leave the option out, or give a quantised checkpoint",
    "serve models/demo-target --enable-lora": "adapters are not loaded; merge them into the checkpoint",
    "serve models/demo-target --kv-cache-dtype fp4": "'fp4' is not one of auto, fp8",
    "serve models/demo-target --chat-template no.jinja": "no.jinja: No such file or directory; correct that setting",
    "serve models/demo-target --redis-url http://x": "start it, or correct --redis-url",
    "serve models/demo-target --redis-url redis://127.0.0.1:{nobody}/0": "start it, or correct --redis-url",
    "serve models/demo-target --api-key ''": "--api-key: a key is empty; give one, or leave the option out",
    "up --draft-model models/demo-hybrid-eagle3": "give a head that was trained for models/demo-target",
    "up --draft-model models/demo-draft,models/demo-draft": "it is given twice; name each --draft-model once",
    "up --drafters -1": "'--drafters': Input should be greater than or equal to 0",
    "down --run-dir README.md": "README.md is a file; give the folder that `outrider up` was started with",
    "demo --port 99999": "'--port' (env var: 'OUTRIDER_PORT'): Input should be less than or equal to 65535",
    "status --url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "status --url nonsense": "it must begin with http:// or https://",
    "chat hi --url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "chat hi --address http://127.0.0.1:8000": "give --url http://127.0.0.1:8000",
    "complete": "Missing argument 'prompt'; `outrider complete --help` lists what there is",
    "complete hi --address 127.0.0.1:{nobody}": "a gateway's gRPC port is its HTTP port plus 1",
    "complete hi --max-tokens -1": "'--max-tokens': Input should be greater than or equal to 1",
    "complete hi --prediction no-file.txt --address 127.0.0.1:{nobody}": "no-file.txt: No such file or directory",
    "bench --base-url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "audit http://127.0.0.1:{nobody}": "no answer: [Errno 111] Connection refused",
    "verify no-file.json --model models/demo-target": "outrider: no-file.json: No such file or directory\n",
    "train auto no/such/folder": "MODEL: no/such/folder does not exist, and is no id of the Hugging Face Hub",
    "train auto models/demo-target --hours 0": "--hours must be above 0, not 0",
    "doctor --device tpu": "--device must be auto, cpu or cuda, not tpu",
    "key new": "Missing argument 'name'; `outrider key new --help` lists what there is",
}


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("line", LINES)
def test_it_is_said_in_one_line(line: str, busy_port: int, tmp_path: Path) -> None:
    words = [
        word.replace("{busy}", str(busy_port)).replace("{nobody}", str(nobodys_port())) for word in shlex.split(line)
    ]
    if words[0] in _STARTS:
        ports = () if "--port" in words else ("--port", str(server_port()))
        words += [*ports, "--grpc-port", str(server_port()), "--run-dir", str(tmp_path / "run")]
    began = time.monotonic()
    done = outrider(*words)
    print(f"{time.monotonic() - began:.1f} s: outrider {line}")
    steps = ("abilities ...",)  # what `audit` looks at
    said = [text for text in done.stderr.splitlines() if text and text not in steps]
    assert (done.returncode in (1, 2, 3), len(said)) == (True, 1), done.stderr
    assert LINES[line] in done.stderr
    assert not (tmp_path / "run").exists()


def test_there_are_as_many_as_the_title_says() -> None:
    assert len(LINES) == 46
    assert (ROOT / "models/demo-target").is_dir()
