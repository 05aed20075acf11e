"""The systems that are measured: this one, llama.cpp and vLLM, each serving the same weights for as long as it runs.

llama.cpp reads the GGUF file as it is. vLLM's CPU build reads no GGUF, so it gets the same weights dequantised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peers.llama_cpp import llama_server_command
from benchmarks.peers.server_process import ServerProcess
from benchmarks.real_chat.traffic import Variant
from outrider.client.rest import get_json, rest_client, served_model
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.local_models import with_folders
from outrider.client.stack.processes import Stack, free_port
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.guards import read_config, resolve_max_model_len
from outrider.engine.model.weights import read_weights

NUM_SPECULATIVE_TOKENS = 5
# tokens; a question, its template and an answer
SHORT_CONTEXT = 1024
_XLLAMACPP_SERVER = Path(__file__).parents[1] / "peers" / "xllamacpp_server.py"
# seconds; vLLM compiles the model at its first start
_START_TIMEOUT_S = 600.0
# GiB; twice what its requests fill, where its default is a share of the machine's memory
_VLLM_ENVIRON = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

# Its own sampling defaults cut the law, and it would keep prompts between runs.
_LLAMA_CPP_FIELDS = {"cache_prompt": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Progress = Callable[[str], None]


class Limits(NamedTuple):
    """Of a peer's server. context_len: tokens per slot. drafts: whether it is measured with drafts too."""

    num_slots: int
    context_len: int
    drafts: bool = True


def context_of(model: str) -> int:
    """Returns the longest context that the model may be served with, in tokens."""
    folder = model_folder(model)
    return resolve_max_model_len(folder, read_config(folder), None)


def outrider(
    model: str,
    head: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    folder: Path,
    until: ExitStack,
    progress: Progress,
) -> list[Variant]:
    """Returns plain decoding, each method at each length, and `auto`. Stopped when `until` is closed.

    head: a draft model or head; empty: none. methods: of those served; empty: all; "off": plain decoding alone.
    """
    settings = with_folders(
        StackSettings(model=model, draft_model=head, port=free_port(), grpc_port=free_port(), num_drafters=0), progress
    )
    stack = Stack(settings, folder / "outrider", progress, in_foreground=True)
    url = stack.start().url
    until.callback(stack.stop)
    with rest_client(url) as client:
        card = get_json(client, "/v1/models")["data"][0]
    served = [method for method in card["draft_methods"] if not methods or method in methods]
    drafts = [(method, length) for method in served for length in lengths]
    variants = []
    others = [] if list(methods) == ["off"] else [*drafts, ("auto", NUM_SPECULATIVE_TOKENS)]
    for method, length in [("off", 0), *others]:
        speculation = {"method": method, "num_speculative_tokens": length or NUM_SPECULATIVE_TOKENS}
        name = f"{method} {length}" if (method, length) in drafts and len(lengths) > 1 else method
        variants.append(Variant("outrider", name, url, card["id"], {"speculation": speculation}, takes_salt=True))
    return variants


def llama_cpp(
    program: Sequence[str], option: str, gguf: Path, head: Path | None, limits: Limits, folder: Path, until: ExitStack
) -> list[Variant]:
    """Plain, its n-grams, and an EAGLE-3 head. program: of llama-server's options. option: names the program."""
    variants = []
    kinds = [("off", ["none"]), ("ngram", ["ngram-simple"])]
    if head:
        kinds.append(("eagle3", ["draft-eagle3", "--spec-draft-model", str(head)]))
    for name, spec_type in kinds if limits.drafts else kinds[:1]:
        port = free_port()
        command = llama_server_command(program, gguf, port, num_slots=limits.num_slots, context_len=limits.context_len)
        command += ["--spec-type", *spec_type]
        log = folder / f"llama-cpp-{name}.log"
        server = ServerProcess(command, port, log, option=option, start_timeout_s=_START_TIMEOUT_S)
        until.enter_context(server)
        variants.append(Variant("llama.cpp", name, server.url, _model(server.url), _LLAMA_CPP_FIELDS, process=server))
    return variants


def llama_server_of_package(python: Path) -> list[str]:
    """The program for `llama_cpp` where `python` has the package xllamacpp."""
    return [str(python), str(_XLLAMACPP_SERVER)]


def vllm(
    python: Path, model: str, eagle3: str, length: int, limits: Limits, folder: Path, until: ExitStack
) -> list[Variant]:
    """Plain, n-grams, and an EAGLE-3 head of `length` tokens. python: that has vllm. eagle3: the head; empty: none."""
    weights = folder / "dequantised"
    save_dequantised(model, weights)
    variants = []
    ngram = {"method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": 5}
    kinds: list[tuple[str, dict[str, object]]] = [("off", {}), ("ngram", ngram)]
    if eagle3:
        kinds.append(("eagle3", {"method": "eagle3", "num_speculative_tokens": length, "model": eagle3}))
    for name, config in kinds if limits.drafts else kinds[:1]:
        speculation = ("--speculative-config", json.dumps(config)) if config else ()
        port = free_port()
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(limits.context_len), "--max-num-seqs", str(limits.num_slots), *speculation),
        ]
        log = folder / f"vllm-{name}.log"
        server = ServerProcess(
            command, port, log, option="--vllm", start_timeout_s=_START_TIMEOUT_S, environ=_VLLM_ENVIRON
        )
        until.enter_context(server)
        variants.append(Variant("vllm", name, server.url, _model(server.url), takes_salt=True, process=server))
    return variants


def save_dequantised(model: str, folder: Path) -> None:
    """A bf16 checkpoint of a GGUF file's weights, or of a quantised checkpoint's."""
    source = model_folder(model)
    config = read_config(source)
    weights = read_weights(source, config, torch.bfloat16, torch.device("cpu"), for_engine=False)
    weights.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copy(Path(source) / name, folder / name)


def _model(url: str) -> str:
    with rest_client(url) as client:
        return served_model(client)
