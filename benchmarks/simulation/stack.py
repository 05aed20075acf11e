"""The real stack for measurements: a target of real cost, its drafters behind links that delay, every /metrics read.

Not here: what is measured (record.py, validate.py, ../round_trip.py).
"""

from __future__ import annotations

import re
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import Shape
from benchmarks.simulation.link import DelayedLink
from models.make.expand import main as expand
from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Progress, Stack, free_port

METHOD = "draft_model"
_SAMPLE = re.compile(r"^outrider:(\w+?)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_OF_EVERY_SERIES = re.compile(r'(?:engine|model_name)="[^"]*",?')


@dataclass
class MeasuredStack:
    """links: by service, those between it and the gateway. metrics_urls: of gateway, verifier and a single drafter."""

    state: StackState
    links: dict[str, DelayedLink] = field(default_factory=dict)
    metrics_urls: dict[str, str] = field(default_factory=dict)

    def scrape(self, service: str) -> dict[str, float]:
        """Every sample of the service's /metrics, by name and labels as they are written there, without the model's."""
        with urllib.request.urlopen(self.metrics_urls[service], timeout=10) as reply:
            text = reply.read().decode()
        found = {}
        for name, all_labels, value in _SAMPLE.findall(text):
            labels = _OF_EVERY_SERIES.sub("", all_labels).rstrip(",")
            found[f"{name}{{{labels}}}" if labels else name] = float(value)
        return found


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Returns the growth of every sample of a service between two scrapes."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def mean_of(grown: dict[str, float], name: str, labels: str = "") -> float:
    """Returns the mean of a histogram's growth; 0 where nothing was observed."""
    count = grown.get(f"{name}_count{labels}", 0.0)
    return grown.get(f"{name}_sum{labels}", 0.0) / count if count else 0.0


class _Stack(Stack):
    """A stack, with links before verifier and drafter where they are wanted."""

    def __init__(
        self, settings: StackSettings, run_dir: Path, progress: Progress, links: dict[str, DelayedLink]
    ) -> None:
        super().__init__(settings, run_dir, progress, in_foreground=True)
        self._links = links

    def _gateway_command(self) -> list[str]:
        command = super()._gateway_command()
        for kind, addresses in (("verifier", self.state.verifiers), ("drafter", self.state.drafters)):
            if kind in self._links:
                command += [f"--{kind}s", self._links[kind].start(addresses[0])]  # the last one counts
        return command


@contextmanager
def measured_stack(
    target: Path,
    draft: Path,
    progress: Progress,
    *,
    num_drafters: int = 1,
    with_links: bool = False,
    gateway_args: tuple[str, ...] = (),
) -> Iterator[MeasuredStack]:
    """with_links: what goes between gateway and services is counted, and can be delayed; one drafter then."""
    with ExitStack() as exits:
        run_dir = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        links = {kind: exits.enter_context(DelayedLink()) for kind in ("verifier", "drafter") if with_links}
        ports = {kind: free_port() for kind in ("verifier", "drafter")}
        settings = StackSettings(
            model=str(target),
            draft_model=str(draft),
            methods=(METHOD,),
            port=0,
            grpc_port=-1,
            num_drafters=num_drafters,
            verifier_args=("--metrics-port", str(ports["verifier"])),
            # Several drafters cannot have the same one.
            drafter_args=("--metrics-port", str(ports["drafter"])) if num_drafters == 1 else (),
            gateway_args=("--per-request-spec-decode-metrics", "detailed", *gateway_args),
        )
        stack = _Stack(settings, run_dir, progress, links)
        exits.callback(stack.stop)
        state = stack.start()
        urls = {kind: f"http://127.0.0.1:{port}/metrics" for kind, port in ports.items()}
        yield MeasuredStack(state, links, {**urls, "gateway": f"{state.url}/metrics"})


def plain(max_tokens: int) -> Shape:
    """Asks for no drafts. A length is given all the same: the gateway takes no 0."""
    return Shape(max_tokens, "off", 1)


@contextmanager
def expanded_target(small: Path, progress: Progress) -> Iterator[Path]:
    """The small target inside a model of real cost (models/make/expand.py), in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        progress("expanding the target to a model of real cost")
        expand(small, Path(folder) / "target")
        yield Path(folder) / "target"
