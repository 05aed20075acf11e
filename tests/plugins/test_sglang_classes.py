"""The algorithm OUTRIDER in SGLang's own classes, where SGLang's files are importable (pip install --no-deps sglang).

Its registry, its arguments, NGRAMWorker, Req and the links that it makes of a tree are SGLang's. Stand-ins
are what only its builds for a device have: the compiled kernels (sgl_kernel) and torchvision, and the target.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from tests.plugins.fake_runner import cycle
from tests.plugins.served_drafter import drafter, until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
# Packages with code for a device.
_STANDINS = ("sgl_kernel", "torchvision", "torchaudio", "torchcodec")


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock()
        setattr(self, name, made)
        return made


class _Standins(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _STANDINS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it but what is asked for."""


@pytest.fixture(scope="module")
def algorithm() -> Iterator[Any]:
    """OUTRIDER as SGLang's registry has it."""
    from transformers import AutoProcessor  # noqa: F401  looks for torchvision, which is not there yet

    finder = _Standins()
    sys.meta_path.insert(0, finder)
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        from outrider.sglang import register

        register()
        yield SpeculativeAlgorithm.from_string("outrider")
    finally:
        sys.meta_path.remove(finder)


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*addresses: str, **given: Any) -> Any:
        from sglang.srt.server_args import ServerArgs

        said = {"drafters": list(addresses), "method": "ngram", "deadline_ms": 10_000}
        monkeypatch.setenv("OUTRIDER_OPTIONS", json.dumps(said))
        made = ServerArgs(
            model_path=str(ROOT / "models/demo-target"), device="cpu", speculative_algorithm="OUTRIDER", **given
        )
        made.resolve_once()
        return made

    return make


def test_the_scheduler_finds_all_that_it_asks_an_algorithm_for(algorithm: Any) -> None:
    """CustomSpecAlgo of 0.5.23 has no create_future_map, and the scheduler calls it."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    asked = {name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and not name.startswith("_")}
    lacking = asked - {"from_string", "register"} - set(dir(CustomSpecAlgo))
    assert "create_future_map" in lacking
    assert all(callable(getattr(algorithm, name)) for name in asked)
    assert algorithm.is_ngram()
    assert not algorithm.has_draft_kv()
    assert not algorithm.is_eagle()


def test_its_arguments_are_resolved_as_ngram_s(algorithm: Any, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    said = resolving_view(server_args("h:1", speculative_num_draft_tokens=8, speculative_eagle_topk=2))
    assert (said.speculative_num_draft_tokens, said.speculative_eagle_topk, said.speculative_num_steps) == (8, 2, 4)
    assert said.disable_overlap_schedule, "SGLang's speculation has no overlap on a CPU"
    with pytest.raises(ValueError, match="2 or more"):
        server_args("h:1", speculative_num_draft_tokens=1)
    with pytest.raises(ValueError, match="drafters"):
        server_args()


@pytest.mark.parametrize("overlap", [False, True])
def test_sglang_s_worker_gets_the_drafts(algorithm: Any, server_args: Any, overlap: bool) -> None:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.runtime_context import publish
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.ngram_worker import NGRAMWorker, _derive_tree_links

    from outrider.plugins.sglang import worker_class

    with drafter() as served:
        given = server_args(served.address, speculative_num_draft_tokens=5)
        publish(given, role="scheduler")
        assert issubclass(algorithm.create_worker(given), NGRAMWorker)
        one_rank = SimpleNamespace(rank_in_group=0, world_size=1)
        target = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100), model_runner=None)
        worker = worker_class(NGRAMWorker, lambda: one_rank)(given, 0, 0, target)
        worker.enable_overlap = overlap
        until(lambda: worker.ngram_corpus._drafts.fleet.links[0].is_up, "the drafter is not there")
        texts = [cycle(3 + 9 * number, 5, 90) for number in range(3)]
        made = [Req(f"r{row}", "", text[:20], SamplingParams(max_new_tokens=70)) for row, text in enumerate(texts)]
        new = [[text[20]] for text in texts]  # a prompt's own token
        for step in range(20):
            if not overlap:
                for request, tokens in zip(made, new, strict=True):
                    request.output_ids.extend(tokens)
            padded = torch.tensor([[*tokens, *[0] * (5 - len(tokens))] for tokens in new])
            relayed = SimpleNamespace(accept_tokens=padded.flatten(), accept_lens=torch.tensor([*map(len, new)]))
            batch = SimpleNamespace(reqs=made, spec_info=relayed, grammar_needs_sync=lambda: False)
            drafted, mask = worker._prepare_draft_tokens(batch)
            worker._update_ngram_corpus(batch)
            children, siblings = _derive_tree_links(mask, len(made), 5)
            assert (siblings == -1).all(), "chains"
            for row, (request, text) in enumerate(zip(made, texts, strict=True)):
                if overlap:
                    request.output_ids.extend(new[row])
                said, node, new[row] = text[20 + len(request.output_ids) :], 0, []
                for token in said:
                    node = int(children[row, node])
                    new[row].append(token)
                    if node < 0 or drafted[5 * row + node] != token:
                        break
                assert step < 2 or len(new[row]) == min(5, len(said)), "all four drafts are right"
        assert all(
            list(request.output_ids) + new[row] == text[20:]
            for row, (request, text) in enumerate(zip(made, texts, strict=True))
        )
        worker.ngram_corpus.erase_match_state([request.rid for request in made])
        until(lambda: served.engine.num_sessions == 0, "sessions are still open")
        worker.ngram_corpus.close()
