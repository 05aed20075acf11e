"""Every model family with every draft method: the files of a checkpoint in, the target's own output out.

Targets are random, a few layers wide, with the settings of the public configs that matter to a drafter: GQA, RoPE
scaling, windows, experts, partial rotary, biases, tied embeddings. Heads are written in their public layouts, served
as the drafter serves them, and their chains and trees verified by a real engine in exact mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.checkpoints import export
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_methods
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.engine.tiny_models import save_tiny_model
from tests.grid.driver import Driver, Session
from tests.grid.models import GridModel
from tests.grid.pools import ROOMY_BLOCKS, Pools

VOCAB_SIZE, HIDDEN, NUM_LAYERS = 96, 64, 4
NUM_TOKENS = 24
PROMPT = tuple(3 + (7 * place) % 90 for place in range(21))
SETTINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(temperature=0.8, seed=3)}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> (config class, settings). Windows are shorter than the prompt.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama3.1": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "vicuna-16k": (
        "LlamaConfig",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 9, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": False}),
}
METHODS = ("draft_model", "medusa", "mlp_speculator", "eagle", "eagle3")
# Phi's output head has a bias, which is no part of what an EAGLE-1 head multiplies with.
REFUSED = {("phi", "eagle"): r"applies a bias \(lm_head.bias\) after it"}
SERVED = [(family, method) for family in FAMILIES for method in METHODS if (family, method) not in REFUSED]
IN_VERIFIER = [(family, kind) for family in ("qwen2", "mixtral") for kind in ("eagle", "eagle3")]


@dataclass(frozen=True)
class Family:
    """`folder` holds the target, and the checkpoint of each method under its name."""

    folder: Path
    pools: Pools
    plain: dict[str, list[int]]

    @property
    def target(self) -> Path:
        return self.folder / "target"


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    config_name, settings = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    target = save_tiny_model(config_name, _COMMON | settings, folder / "target", seed=1)
    draft = save_tiny_model(config_name, _COMMON | settings | {"num_hidden_layers": 2}, folder / "draft_model", seed=1)
    weights = load_target_weights(target, torch.float32)
    for kind in METHODS[1:]:
        torch.manual_seed(METHODS.index(kind))
        save_head(kind, weights, folder / kind)
    pools = Pools(GridModel(target, draft, "float32"), num_threads=1)
    plain = {}
    for name in SETTINGS:
        session = session_of(name, None, tree=False)
        Driver(pools.pool("whole", ROOMY_BLOCKS)).run([session])
        assert not session.failure
        plain[name] = session.output
    yield Family(folder, pools, plain)
    pools.close()


def save_head(kind: str, target: TargetWeights, path: Path) -> None:
    """A random head in its public layout, as one that was trained for this target would be."""
    if kind == "medusa":
        heads = MedusaHeads(MedusaConfig(HIDDEN, VOCAB_SIZE, num_heads=3))
        export.export_medusa(heads, path, target=target.path)
        return
    if kind == "mlp_speculator":
        config = MlpSpeculatorConfig(VOCAB_SIZE, HIDDEN, n_predict=3, inner_dim=48)
        export.export_mlp_speculator(MlpSpeculator(config), path)
        return
    decoder = DecoderConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
    )
    if kind == "eagle":  # with the target's embedding written along, and no output head: as yuhuili/EAGLE-*
        eagle = EagleHead(
            EagleConfig(decoder, NUM_LAYERS, fc_bias=False), embedding=target.embedding, lm_head=target.lm_head
        )
        export.export_eagle(eagle, path)
        return
    known = torch.sort(torch.randperm(VOCAB_SIZE)[:64]).values
    eagle3 = Eagle3Head(
        Eagle3Config(decoder, feature_layers=(1, 2, 3), draft_vocab_size=64),
        embedding=target.embedding,
        d2t=known - torch.arange(64),
    )
    export.export_eagle3(
        eagle3, path, target=target.path, target_architecture=target.architecture, with_embedding=False
    )


def serve(family: Family, kind: str, loaded: LoadedModel | None = None) -> DraftMethod:
    path = family.folder / kind
    assert recognise(path) == kind
    config = DrafterConfig(
        draft_model=(str(path),),
        target_model=str(family.target),
        methods=(kind,),
        dtype="float32",
        kv_cache_mb=4,
        num_threads=1,
    )
    return build_methods(config, lambda _line: None, loaded)[kind]


def session_of(setting: str, method: DraftMethod | None, *, tree: bool) -> Session:
    params = SamplingParams(**(vars(SETTINGS[setting]) | {"max_tokens": NUM_TOKENS, "ignore_eos": True}))
    name = f"{setting}-{tree}-{method.info.name if method else 'plain'}"
    spec = SessionSpec(name, 0, PROMPT, (), params, SpeculationMode.EXACT, stream_key=17, cache_salt=name)
    return Session(spec, method, gamma=3, free_run=1 if method else NUM_TOKENS, tree=tree)


@pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="module")
def test_plain_decoding_is_that_of_transformers(family: Family) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(family.target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
    assert found[0, len(PROMPT) :].tolist() == family.plain["greedy"]


@pytest.mark.parametrize(("family", "kind"), SERVED, indirect=["family"], scope="module")
def test_output_is_that_of_plain_decoding(family: Family, kind: str) -> None:
    method = serve(family, kind)
    sessions = {
        (setting, tree): session_of(setting, method, tree=tree) for setting in SETTINGS for tree in (False, True)
    }
    Driver(family.pools.pool("whole", ROOMY_BLOCKS)).run(list(sessions.values()))
    for (setting, tree), session in sessions.items():
        assert not session.failure
        assert session.output == family.plain[setting], (setting, tree)
        # Nearly every round had a draft: heads lack the first one's hidden state, the last has no room.
        num_rounds = NUM_TOKENS - session.num_accepted_tokens
        assert session.num_draft_tokens >= 2 * (num_rounds - 4)
        if tree:
            assert session.num_draft_tokens > sessions[setting, False].num_draft_tokens
    # A draft with the target's first layers, embedding and output head is right now and then.
    if kind == "draft_model":
        assert sum(session.num_accepted_tokens for session in sessions.values()) > 0


@pytest.mark.parametrize(("family", "kind"), IN_VERIFIER, indirect=["family"], scope="module")
def test_a_head_beside_its_target_drafts_with_the_targets_own_matrices(family: Family, kind: str) -> None:
    """It has no copy of them, and proposes what it does with one."""
    target = family.pools.target
    beside, alone = serve(family, kind, target), serve(family, kind)
    head = beside._net._paged.head  # type: ignore[attr-defined]
    assert head.embed_tokens is target.model.get_input_embeddings()
    if kind == "eagle":
        assert head.lm_head is target.model.get_output_embeddings()
    counts = []
    for method in (beside, alone):
        sessions = [session_of(setting, method, tree=True) for setting in SETTINGS]
        Driver(family.pools.pool("whole", ROOMY_BLOCKS)).run(sessions)
        assert [session.output for session in sessions] == list(family.plain.values())
        counts.append([(session.num_draft_tokens, session.num_accepted_tokens) for session in sessions])
    assert counts[0] == counts[1]
    assert sum(drafted for drafted, _accepted in counts[0]) > NUM_TOKENS


@pytest.mark.parametrize(("family", "kind"), REFUSED, indirect=["family"], scope="module")
def test_what_a_target_cannot_serve_is_refused_with_the_reason(family: Family, kind: str) -> None:
    with pytest.raises(CheckpointRefused, match=next(iter(REFUSED.values()))):
        serve(family, kind)
