"""What public servers of hybrid models were wrong at, each as a test: bits of the state after rejected drafts, n-grams,
cached prefixes of another length, long contexts, grammars, and acceptance that counts what was never emitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.states import RecurrentStates
from outrider.shared.messages import LocalDrafts, Proposal, SessionSpec, TokenOrigin
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams
from outrider.verifier_service.engine import VerifierEngine
from tests.drafting.agreeing_mtp import save_served_hybrid
from tests.verifier_service.drafts import oracle_draft, tree_draft
from tests.verifier_service.engine_client import (
    PARAMS,
    PROMPT,
    VOCAB_SIZE,
    EngineShape,
    Session,
    generate,
    make_spec,
    running_engine,
    tokens_of,
)
from tests.verifier_service.served_target import Outcome, Served, decode, digest, served

# Thousands of forwards: seconds, but for a machine that is busy otherwise.
pytestmark = pytest.mark.timeout(900)
NUM_WRONG_ROUNDS = 600
WAYS = {
    "mtp": LocalDrafts("mtp", 3),
    "mtp tree": LocalDrafts("mtp", 5, token_tree=True),
    "ngram": LocalDrafts("ngram", 4),
}
LAWS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=21, ignore_eos=True),
}
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "value": {"type": "integer"}},
        "required": ["name", "value"],
        "additionalProperties": False,
    },
}
LONG_LENGTH = 4133


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = save_served_hybrid(tmp_path_factory.mktemp("served") / "hybrid", max_model_len=8192)
    return served(folder, ("mtp", "ngram"))


# ---- the state after rejected drafts ----


def state_of(engine: VerifierEngine, states: RecurrentStates, session: Session) -> tuple[int, list[torch.Tensor]]:
    """Position, and every bit that the session's next forward reads."""
    state = engine._sessions[session.handle].state
    assert state is not None
    slot, kept = state.slot, state.kept_rows
    tensors = [
        part for layer in states.layers for part in (layer.state[slot], layer.window[slot], layer.log[slot, kept])
    ]
    return state.position, [tensor.clone() for tensor in tensors]


def test_after_600_wrong_drafts_the_state_is_that_of_plain_decoding(
    loaded: LoadedModel, certificate: Certificate
) -> None:
    """Compared to the bit after every round: a trace too small to change a token would change one later."""
    params = replace(PARAMS["greedy"], max_tokens=NUM_WRONG_ROUNDS + 9)  # so that no draft is cut
    spec = make_spec(PROMPT, params)
    shape = EngineShape(num_blocks=400, prefix_caching=False)
    with (
        running_engine(loaded, certificate, shape) as engine,
        Session(engine, spec) as plain,
        Session(engine, spec) as drafted,
    ):
        states = engine.rounds.runner.states
        assert states is not None
        assert plain.step(0)[0].token_ids == drafted.step(0)[0].token_ids
        for end in range(1, NUM_WRONG_ROUNDS):
            (right,) = plain.step(end)[0].token_ids
            wrong = (right + 1) % VOCAB_SIZE
            (commit,) = drafted.step(end, Proposal(end, (wrong, right, right, wrong), "wrong"))
            assert (commit.num_draft_tokens, commit.num_accepted_tokens) == (4, 0)
            assert commit.token_ids == (right,)
            (position, expected), (found_position, found) = (
                state_of(engine, states, session) for session in (plain, drafted)
            )
            assert position == found_position == len(PROMPT) + end
            assert all(map(torch.equal, expected, found)), end


# ---- what is counted ----


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_acceptance_counts_emitted_tokens_alone(loaded: LoadedModel, certificate: Certificate, shape: str) -> None:
    """Right drafts that reach beyond a stop token, or beyond max_tokens, are accepted up to there."""
    with running_engine(loaded, certificate) as engine:
        right = tokens_of(generate(engine, make_spec(PROMPT, PARAMS["greedy"])))
        draft = {"chain": lambda: oracle_draft(right, 9), "tree": lambda: tree_draft(right, 3)}[shape]
        stop = right[17]
        ends = {
            right.index(stop) + 1: replace(PARAMS["greedy"], stop_token_ids=(stop,)),
            13: replace(PARAMS["greedy"], max_tokens=13),
        }
        for length, params in ends.items():
            commits = generate(engine, make_spec(PROMPT, params), draft())
            assert tokens_of(commits) == right[:length]
            for commit in commits:
                assert commit.num_accepted_tokens == commit.origins.count(TokenOrigin.ACCEPTED)
            accepted = sum(commit.num_accepted_tokens for commit in commits)
            assert 0 < accepted < length
            if params.stop_token_ids and shape == "chain":
                assert accepted < sum(commit.num_draft_tokens for commit in commits), "nothing was cut off"


# ---- the methods of a hybrid's verifier ----


def spec_of(prompt: list[int], law: str, max_tokens: int, salt: str, **fields: object) -> SessionSpec:
    params = replace(LAWS[law], max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return make_spec(prompt, params, cache_salt=salt)


def text_prompt(served: Served, length: int) -> list[int]:
    """Code that repeats itself with changes."""
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(served.loaded.path) / "tokenizer.json"))
    text = "".join(f"def f{place}(a, b):\n    return a + {place} * b\n\n\n" for place in range(length))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids[:length]
    assert len(token_ids) == length
    return token_ids


def check_counts(outcome: Outcome) -> None:
    assert outcome.num_accepted == outcome.origins.count(TokenOrigin.ACCEPTED) <= outcome.num_draft_tokens


def alike(engine: VerifierEngine, spec: Callable[[str], SessionSpec]) -> dict[str, Outcome]:
    """All ways at once, drafted and not; spec takes a salt. Asserts that every output is that of plain decoding."""
    (plain,) = decode(engine, [spec("off")], None)
    found = {"off": plain}
    for name, way in WAYS.items():
        (found[name],) = decode(engine, [spec(name)], way)
        assert digest([found[name]]) == digest([plain]), name
        check_counts(found[name])
        assert found[name].num_draft_tokens > 0, name
    return found


@pytest.mark.parametrize("law", LAWS)
def test_mtp_and_ngram_drafts(hybrid: Served, law: str) -> None:
    """Among them right ones, wrong ones, and for n-grams rounds without any."""
    prompt = text_prompt(hybrid, 90)
    with hybrid.engine() as engine:
        found = alike(engine, lambda salt: spec_of(prompt, law, 160, salt))
    for name in ("mtp", "mtp tree", "ngram") if law == "greedy" else ("mtp", "mtp tree"):
        assert 0 < found[name].num_accepted < found[name].num_draft_tokens
    assert found["ngram"].origins.count(TokenOrigin.TARGET) > 1


@pytest.mark.parametrize("num_tokens", [60, pytest.param(300, marks=pytest.mark.storm)])
@pytest.mark.parametrize("law", LAWS)
def test_a_grammar(hybrid: Served, law: str, num_tokens: int) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    prompt = text_prompt(hybrid, 30)
    with hybrid.engine() as engine:
        found = alike(engine, lambda salt: spec_of(prompt, law, num_tokens, salt, grammar=grammar))
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(hybrid.loaded.path) / "tokenizer.json"))
    text = tokenizer.decode(list(found["off"].token_ids), skip_special_tokens=False)
    assert text.startswith('[{"name":"')
    assert text.count('{"name":"') > num_tokens // 60
    assert found["ngram"].num_accepted > 0


@pytest.mark.parametrize("way", ["off", *WAYS])
def test_a_cached_prefix_of_another_length(hybrid: Served, way: str) -> None:
    """States are kept every 16 positions and at the end of a prompt's last full block; 67 tokens are cached."""
    prompt, tail = text_prompt(hybrid, 67), [11, 12, 13]
    local = WAYS.get(way)
    with hybrid.engine() as engine, hybrid.engine(EngineShape(prefix_caching=False)) as without:
        engine.rounds.scheduler.snapshot_interval = 16
        (first,) = decode(engine, [spec_of(prompt, "greedy", 40, "shared")], local)
        longer = [*prompt, *first.token_ids]
        hits = {15: 0, 16: 16, 17: 16, 31: 16, 32: 32, 33: 32, 63: 48, 64: 64, 66: 64, 67: 64, len(longer): 96}
        for length, hit in hits.items():
            spec = spec_of([*longer[:length], *tail], "seeded", 12, "shared")
            (expected,), (found,) = decode(without, [spec], None), decode(engine, [spec], local)
            assert found.num_cached_tokens == hit, length
            assert found.token_ids == expected.token_ids, length
            check_counts(found)


@pytest.mark.storm
def test_a_long_context(hybrid: Served) -> None:
    """Prompts of four thousand tokens in chunks of two sizes, beside each other; greedy as transformers decodes it."""
    prompt = text_prompt(hybrid, LONG_LENGTH)
    num_tokens, outputs = 24, {}
    for chunk in (512, 96):
        shape = EngineShape(800, 16, max_num_batched_tokens=1024, prefill_chunk_size=chunk, prefix_caching=False)
        with hybrid.engine(shape) as engine:
            for law in LAWS:
                specs = [spec_of(prompt, law, num_tokens, ""), spec_of(prompt[7:], law, num_tokens, "")]
                for way in (None, *(WAYS.values() if chunk == 512 else ())):
                    found = [outcome.token_ids for outcome in decode(engine, specs, way)]
                    assert outputs.setdefault(law, found) == found, (chunk, law, way)
    model = transformers.AutoModelForCausalLM.from_pretrained(hybrid.loaded.path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens)
    assert tuple(expected[0, LONG_LENGTH:].tolist()) == outputs["greedy"][0]
