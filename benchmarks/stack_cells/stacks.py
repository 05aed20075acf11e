"""The stacks of never_slower_held_out. The target is the expanded demo target in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulation.stack import measured_stack
from outrider.client.stack.commands import StackSettings, StackState, verifier_command
from outrider.client.stack.processes import Progress, Stack

# MiB; 16 sessions of a prompt and 400 tokens, and the prefixes of all prompts of a cell.
_KV_CACHE_MB = 1024
# MiB; each of two verifiers has half of the sessions at most.
_KV_CACHE_OF_TWO_MB = 512
# s and share of it; a drafter in another building: 5 ms there and back, each way half to one and a half times its half.
_REMOTE_RTT_S = 0.005
_REMOTE_JITTER = 0.5


@dataclass(frozen=True)
class StackKind:
    """method: what its drafter drafts with, in the verifier unless `remote`.

    second: arguments of a second verifier behind the same gateway, beyond those of the first; None: there is none. Two
    verifiers have one thread each. remote: the drafter is a service of its own behind a link with delay and jitter.
    """

    method: str
    second: tuple[str, ...] | None = None
    remote: bool = False


STACKS = {
    "ngram": StackKind("ngram"),
    "draft_model": StackKind("draft_model"),
    "two alike": StackKind("draft_model", second=()),
    # Forwards that are not recorded: slower, with the same bits, so exact requests may go to either verifier.
    "two kinds": StackKind("draft_model", second=("--enforce-eager", "true")),
    "remote": StackKind("draft_model", remote=True),
}


@contextmanager
def running_stack(name: str, target: Path, models: Path, run_dir: Path, progress: Progress) -> Iterator[StackState]:
    """name: a key of STACKS. models: folder of the demo family."""
    kind = STACKS[name]
    if kind.remote:
        with measured_stack(target, models / "demo-draft", progress, with_links=True) as measured:
            measured.links["drafter"].set_delay(_REMOTE_RTT_S, _REMOTE_JITTER)
            yield measured.state
        return
    threads = () if kind.second is None else ("--num-threads", "1")
    cache_mb = _KV_CACHE_MB if kind.second is None else _KV_CACHE_OF_TWO_MB
    settings = StackSettings(
        model=str(target),
        draft_model=str(models / "demo-draft") if kind.method == "draft_model" else "",
        methods=(kind.method,),
        port=0,
        grpc_port=-1,
        num_drafters=0,
        verifier_args=("--kv-cache-mb", str(cache_mb), *threads),
    )
    with _Stack(settings, run_dir, progress, kind.second) as state:
        yield state


class _Stack(Stack):
    """A stack, with a second verifier where one is wanted."""

    def __init__(
        self, settings: StackSettings, run_dir: Path, progress: Progress, second: tuple[str, ...] | None
    ) -> None:
        super().__init__(settings, run_dir, progress, in_foreground=True)
        self._second = second

    def _gateway_command(self) -> list[str]:
        """The gateway is the last to start: what it is to be connected to has to serve by now."""
        if self._second is not None:
            args = (*self._settings.verifier_args, *self._second)
            self._spawn("verifier-2", verifier_command(replace(self._settings, verifier_args=args)))
            self.state.verifiers.append(self._wait_serving("verifier-2"))
        return super()._gateway_command()
