"""vLLM's LLM over the services' engines and decode loop, in one process. Not here: beam search, embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.gateway.request.tokenizer import Tokenizer
from outrider.offline.batch import run_batch
from outrider.offline.event_loop import EventLoopThread
from outrider.offline.offline_engine import OfflineEngine
from outrider.offline.outputs import RequestOutput
from outrider.offline.progress import BatchProgress
from outrider.offline.prompts import Prompt
from outrider.offline.speculation import SpeculationPlan
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import SamplingParams

if TYPE_CHECKING:
    from outrider.offline.engines import Engines


class LLM(OfflineEngine):
    """Batches of prompts and chats; each call waits for all of its outputs."""

    def _hold(self, engines: Engines, plan: SpeculationPlan, tokenizer: Tokenizer, seed: int | None) -> None:
        super()._hold(engines, plan, tokenizer, seed)
        self._loop = EventLoopThread("offline")
        self._closing.callback(self._loop.stop)

    def generate(
        self,
        prompts: object,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order.

        prompts: text, {"prompt": text} or {"prompt_token_ids": [...]}, one or a list. sampling_params: one for all, or
        one per prompt; None: get_default_sampling_params(). use_tqdm: True or False; None shows progress if stderr is a
        terminal.

        A failing prompt stops no other: GenerationFailed is raised when all have ended, and has their outputs.
        """
        entries = [prompts] if isinstance(prompts, str | Mapping) else _list("prompts", prompts)
        return self._run([Prompt(entry) for entry in entries], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on one conversation, or a list of them, rendered by the checkpoint's chat template."""
        entries = _list("messages", messages)
        conversations = [entries] if entries and isinstance(entries[0], Mapping) else entries
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run([Prompt(entry, template) for entry in conversations], sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        self._check_open()
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts, but {len(each)} sampling_params: give one for all, or one per prompt",
                param="sampling_params",
            )
        with BatchProgress(len(prompts), use_tqdm) as progress:
            work = run_batch(
                self._generation,
                self._preparation,
                list(zip(prompts, each, strict=True)),
                progress,
                max_num_requests=self._max_num_seqs,
            )
            return self._loop.run(work)


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", param=name)
    return list(value)
