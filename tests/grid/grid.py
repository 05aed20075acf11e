"""Runs cells of one model and compares every output with the plain one.

Plain: nobody drafts, alone in its batch, the whole prompt in one forward, nothing cached.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.serving.combined import CombinedMethod
from outrider.shared.draft_policy.draft_methods import WITH_LOOKUP, without_lookup
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, stream_key
from tests.grid.cells import Cell, groups
from tests.grid.drafts import NoiseMethod, OracleMethod, TreeMethod
from tests.grid.driver import SHORT_RUN, Driver, Session
from tests.grid.heads import HEADS
from tests.grid.intruder import Intruder
from tests.grid.models import TOKENIZER_FOLDER, GridModel
from tests.grid.pools import ROOMY_BLOCKS, SOLO_BLOCKS, Pool, Pools
from tests.grid.requests import GROWN_LENGTH, NUM_TOKENS, PARAMS, prompt_heads

Progress = Callable[[int], None]
# Blocks for each session of a crowd that is to be preempted; at its end a session needs 23.
_TIGHT_BLOCKS = 18
_SUFFIX = SuffixSettings(
    max_tree_depth=24, max_cached_requests=100, max_cached_nodes=100_000, max_spec_factor=2.0, min_token_prob=0.05
)
_GROW = SamplingParams(temperature=0.0, max_tokens=GROWN_LENGTH, ignore_eos=True)


@dataclass(frozen=True)
class Outcome:
    """One cell that was run. `first_difference` is the output index where it leaves the plain run, None if nowhere."""

    cell: Cell
    digest: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cached_tokens: int
    first_difference: int | None
    failure: str

    @property
    def agrees(self) -> bool:
        return self.first_difference is None and not self.failure

    def __str__(self) -> str:
        return f"{self.cell}: {self.failure or f'differs from output index {self.first_difference} on'}"


@dataclass
class Report:
    """`plain` and `digests`: parameters' name -> the plain output, and its SHA-256."""

    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def mismatches(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.agrees]


class Grid:
    """One model. `plain` holds the outputs that everything is compared with."""

    def __init__(self, model: GridModel, *, seed: int = 0, num_threads: int = 1, device: str = "cpu") -> None:
        self._pools = Pools(model, num_threads, device)
        self._seed = seed
        self._num_sessions = 0
        self._answers: dict[str, Sequence[int]] = {}
        self._methods: dict[str, DraftMethod] = {}
        self._heads = prompt_heads(TOKENIZER_FOLDER)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.plain: dict[str, tuple[int, ...]] = {}

    def close(self) -> None:
        self._pools.close()

    def run(self, cells: Sequence[Cell], progress: Progress = lambda _count: None) -> Report:
        """Runs the cells (and what fills up their crowds); `progress` is told how many more are done."""
        report = Report()
        plan = list(groups(cells, self._seed))
        self._grow_prompts()
        for name in sorted({cell.parameters for group in plan for cell in group}):
            report.plain[name] = self._plain(name)
            report.digests[name] = digest(report.plain[name])
        for group in plan:
            report.outcomes += self._run_group(group, report)
            progress(len(group))
        return report

    def _grow_prompts(self) -> None:
        """A prompt is a head of real text and what the model itself goes on with."""
        if self.prompts:
            return
        sessions = [self._session(name, None, 0, "", _GROW, head) for name, head in self._heads.items()]
        Driver(self._pools.pool("whole", ROOMY_BLOCKS)).run(sessions)
        for (name, head), session in zip(self._heads.items(), sessions, strict=True):
            self.prompts[name] = (*head, *session.output)

    def _plain(self, name: str) -> tuple[int, ...]:
        if name not in self.plain:
            session = self._session(name, None, 0, "")
            session.free_run = NUM_TOKENS
            Driver(self._pools.pool("whole", ROOMY_BLOCKS)).run([session])
            if session.failure or len(session.output) != NUM_TOKENS or session.num_cached_tokens:
                raise RuntimeError(f"the plain run of {name} is not one: {session}")
            self.plain[name] = tuple(session.output)
        return self.plain[name]

    def _run_group(self, group: Sequence[Cell], report: Report) -> list[Outcome]:
        first = group[0]
        preempted = first.cache == "preempted"
        crowded = first.crowd == "eight"
        num_blocks = (_TIGHT_BLOCKS * len(group) if crowded else SOLO_BLOCKS) if preempted else ROOMY_BLOCKS
        pool = self._pools.pool(first.prefill, num_blocks)
        self._prepare(group, pool)
        sessions = [self._cell_session(cell, place) for place, cell in enumerate(group)]
        before = pool.num_preemptions
        if preempted and not crowded:
            Driver(pool).run(sessions, Intruder(pool).take_blocks)
        else:
            Driver(pool).run(sessions)
        report.num_preemptions += pool.num_preemptions - before
        return [self._outcome(cell, session) for cell, session in zip(group, sessions, strict=True)]

    def _prepare(self, group: Sequence[Cell], pool: Pool) -> None:
        """Brings every prompt that has to be cached into the cache, in the way a former turn would have."""
        driver = Driver(pool)
        evicted = [
            self._former_turn(cell.parameters, _salt(cell, place))
            for place, cell in enumerate(group)
            if cell.cache == "evicted"
        ]
        if evicted:
            driver.run(evicted)
        pool.evict_everything()
        hits = sorted({cell.parameters for cell in group if cell.cache == "hit"})
        if hits:
            driver.run([self._former_turn(name, "hit") for name in hits])

    def _former_turn(self, name: str, salt: str) -> Session:
        """Ends where the prompt ends: its blocks were written by verified trees, not by a prefill."""
        head, prompt = self._heads[name], self.prompts[name]
        return self._session(name, self._method("oracle", "tree"), 5, salt, _GROW, head, prompt[len(head) :])

    def _cell_session(self, cell: Cell, place: int) -> Session:
        method = self._method(cell.drafter, cell.shape) if cell.gamma else None
        session = self._session(cell.parameters, method, cell.gamma, _salt(cell, place))
        session.tree = cell.shape == "tree"
        if cell.drafter == "off_free":
            session.free_run = SHORT_RUN if cell.cache == "preempted" else NUM_TOKENS
        return session

    def _session(
        self,
        name: str,
        method: DraftMethod | None,
        gamma: int,
        salt: str,
        params: SamplingParams | None = None,
        prompt: Sequence[int] = (),
        answer: Sequence[int] = (),
    ) -> Session:
        """A session of the grid's request `name`, unless other parameters, prompt and answer are given. salt: "" is its
        own alone."""
        self._num_sessions += 1
        params = params or PARAMS[name]
        prompt = tuple(prompt) or self.prompts[name]
        session_id = f"{name}-{self._num_sessions}"
        self._answers[session_id] = answer or self.plain.get(name, ())
        cache_salt = salt or session_id
        spec = SessionSpec(
            session_id=session_id,
            epoch=0,
            prompt_token_ids=prompt,
            committed_token_ids=(),
            sampling_params=params,
            mode=params.default_mode,
            stream_key=stream_key(params.seed or 0, prompt, 0),
            cache_salt=cache_salt,
        )
        return Session(spec, method, gamma, free_run=1)

    def _method(self, drafter: str, shape: str) -> DraftMethod:
        key = f"{drafter}-{shape}"
        if key not in self._methods:
            method = self._chain_method(drafter)
            if shape == "tree" and not method.info.proposes_trees:
                method = TreeMethod(method, self._pools.target.vocab_size, self._seed)
            self._methods[key] = method
        return self._methods[key]

    def _chain_method(self, drafter: str) -> DraftMethod:
        builders: Mapping[str, Callable[[], DraftMethod]] = {
            "ngram": lambda: NgramMethod(prompt_lookup_min=1, prompt_lookup_max=4),
            "suffix": lambda: SuffixMethod(_SUFFIX),
            "draft_model": self._pools.draft_method,
            "noise": lambda: NoiseMethod(self._pools.target.vocab_size, self._seed),
            "oracle": lambda: OracleMethod(self._answers),
        }
        if drafter in WITH_LOOKUP:
            return CombinedMethod(self._chain_method(without_lookup(drafter)), SuffixMethod(_SUFFIX))
        return self._pools.head_method(drafter) if drafter in HEADS else builders[drafter]()

    def _outcome(self, cell: Cell, session: Session) -> Outcome:
        expected = self.plain[cell.parameters]
        return Outcome(
            cell=cell,
            digest=digest(session.output),
            num_draft_tokens=session.num_draft_tokens,
            num_accepted_tokens=session.num_accepted_tokens,
            num_cached_tokens=session.num_cached_tokens,
            first_difference=first_difference(expected, session.output),
            failure=session.failure,
        )


def _salt(cell: Cell, place: int) -> str:
    """Cells with a cached prompt share it. Of the others none may find what another one of its crowd has cached."""
    return {"hit": "hit", "evicted": f"evicted-{place}"}.get(cell.cache, "")


def digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index where the two differ, the shorter one's length if one is the other's beginning."""
    for index, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))
