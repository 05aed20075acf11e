"""What trainers and servers rely on in the head modules, besides the equations (which the loaders' tests check)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers
from outrider.drafting.heads.errors import HeadConfigError
from outrider.drafting.heads.frozen import FrozenEmbedding, use_targets
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculatorConfig
from tests.drafting.heads import plain_math, small_heads
from tests.drafting.heads.small_heads import HIDDEN, VOCAB, decoder_config, random

TOKENS = torch.tensor([[4, 9, 100, 0, 33, 33, 7]])
FEATURES = random(1, TOKENS.shape[1], HIDDEN, seed=11)
POSITIONS = torch.arange(TOKENS.shape[1])[None]
HEADS = {"eagle": small_heads.eagle_head, "eagle3": small_heads.eagle3_head}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_without_a_mask_a_row_sees_no_later_one(name: str, implementation: str) -> None:
    head = HEADS[name](attn_implementation=implementation)
    whole = head(TOKENS, FEATURES, POSITIONS)
    for count in range(1, TOKENS.shape[1]):
        part = head(TOKENS[:, :count], FEATURES[:, :count], POSITIONS[:, :count])
        torch.testing.assert_close(part, whole[:, :count], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_eager_and_sdpa_agree_with_and_without_masks(name: str) -> None:
    eager, sdpa = (HEADS[name](attn_implementation=kind) for kind in ("eager", "sdpa"))
    assert torch.allclose(eager(TOKENS, FEATURES, POSITIONS), sdpa(TOKENS, FEATURES, POSITIONS), atol=1e-5)
    allowed = plain_math.causal(TOKENS.shape[1])
    allowed[5, 2] = allowed[6, 0] = False
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[None, None]
    masked = eager(TOKENS, FEATURES, POSITIONS, mask)
    assert torch.allclose(masked, sdpa(TOKENS, FEATURES, POSITIONS, allowed[None, None]), atol=1e-5)
    assert not torch.allclose(masked, eager(TOKENS, FEATURES, POSITIONS), atol=1e-3)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_batch_is_its_sequences(name: str) -> None:
    head = HEADS[name](attn_implementation="sdpa")
    tokens = torch.cat((TOKENS, TOKENS.flip(1)))
    features = torch.cat((FEATURES, 2 * FEATURES))
    both = head(tokens, features, POSITIONS.expand(2, -1))
    for place in range(2):
        alone = head(tokens[place : place + 1], features[place : place + 1], POSITIONS)
        torch.testing.assert_close(both[place], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_learns_and_the_targets_do_not(name: str) -> None:
    head: Any = HEADS[name](attn_implementation="sdpa").train()
    fused = head.fuse(random(1, TOKENS.shape[1], HIDDEN * len(head.feature_layers), seed=12))
    head.logits(head(TOKENS, fused, POSITIONS)).square().sum().backward()
    without = [key for key, found in head.named_parameters() if found.grad is None or not found.grad.any()]
    assert without == []
    assert not any(key.startswith(("embed_tokens", "rotary")) for key in head.state_dict())


def test_medusa_starts_as_the_targets_own_head() -> None:
    """As in the reference: before training every head repeats the target's distribution."""
    lm_head, hidden = random(VOCAB, HIDDEN, seed=2), random(4, HIDDEN, seed=13)
    for shares in (False, True):
        heads = MedusaHeads(MedusaConfig(HIDDEN, VOCAB, 2, shares_lm_head=shares), lm_head=lm_head)
        wanted = (hidden @ lm_head.T)[:, None].expand(-1, 2, -1)
        torch.testing.assert_close(heads(hidden), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_casting_a_head_leaves_the_frequencies_of_rope_alone(name: str) -> None:
    head: Any = HEADS[name]()
    before = head.rotary_emb.inv_freq.clone()
    head.bfloat16()
    assert head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(head.rotary_emb.inv_freq, before)
    assert head(TOKENS, FEATURES, POSITIONS + 1900).dtype == torch.bfloat16


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_head_built_on_meta_and_filled_is_the_same(name: str) -> None:
    head: Any = HEADS[name]()
    given = {"d2t": head.d2t} if name == "eagle3" else {"lm_head": head.lm_head.weight}
    with torch.device("meta"):
        empty = type(head)(head.config, embedding=head.embed_tokens.weight, attn_implementation="eager", **given)
    empty.load_state_dict(head.state_dict(), assign=True)
    assert torch.equal(empty.eval()(TOKENS, FEATURES, POSITIONS), head(TOKENS, FEATURES, POSITIONS))


def test_an_own_embedding_starts_as_the_targets() -> None:
    config = Eagle3Config(decoder_config(), (2,), has_embedding=True)
    embedding = random(VOCAB, HIDDEN, seed=1)
    head = Eagle3Head(config, embedding=embedding)
    assert torch.equal(head.state_dict()["embed_tokens.weight"], embedding)
    assert not head.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(("num_layers", "wanted"), [(32, (2, 16, 29)), (6, (2, 3, 3)), (4, (1, 2, 2))])
def test_default_feature_layers(num_layers: int, wanted: tuple[int, ...]) -> None:
    assert default_feature_layers(num_layers) == wanted


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MedusaConfig(HIDDEN, VOCAB, 0), "num_heads=0"),
        (lambda: MedusaConfig(HIDDEN, 10, 2, head_vocab_size=11), "head_vocab_size=11 is above vocab_size=10"),
        (lambda: MedusaHeads(MedusaConfig(HIDDEN, 10, 2, head_vocab_size=9)), "9 of 10 tokens need a token_map"),
        (lambda: MedusaHeads(MedusaConfig(HIDDEN, 10, 2, shares_lm_head=True)), "no lm_head of its own"),
        (
            lambda: MedusaHeads(MedusaConfig(HIDDEN, 10, 2, shares_lm_head=True), lm_head=random(9, HIDDEN)),
            r"lm_head has shape \[9, 36\], its config says \[10, 36\]",
        ),
        (lambda: MlpSpeculatorConfig(10, 4, n_predict=1, tie_weights=True), "n_predict=1 ties nothing"),
        (lambda: MlpSpeculatorConfig(10, 4, n_predict=2, top_k_tokens_per_head=(1,)), "has 1 entries, n_predict is 2"),
        (lambda: small_heads.mlp_speculator().step(random(1, 30), torch.tensor([1]), 3), "head 3 is outside"),
        (lambda: decoder_config(num_key_value_heads=3), "4 query heads over 3 key-value heads"),
        (lambda: decoder_config(head_dim=5), "head_dim=5 is odd"),
        (lambda: decoder_config(rope_parameters={"rope_type": "dynamic"}), "rope_type='dynamic'"),
        (lambda: decoder_config(model_type="gpt2"), "model_type='gpt2'"),
        (lambda: Eagle3Config(decoder_config(), (2,), draft_vocab_size=200), "draft_vocab_size=200 is above"),
        (lambda: Eagle3Config(decoder_config(), (2,), fc_norm=True, norm_before_fc=True), "exclude each other"),
        (lambda: Eagle3Config(decoder_config(), (2, 3), has_fc=False), "without fc"),
        (
            lambda: Eagle3Head(Eagle3Config(decoder_config(), (2,), 20), embedding=random(VOCAB, HIDDEN)),
            "20 of 101 tokens needs d2t",
        ),
        (lambda: Eagle3Head(Eagle3Config(decoder_config(), (2,))), "no embedding of its own"),
    ],
)
def test_what_cannot_be_built_says_why(build: Any, message: str) -> None:
    with pytest.raises(HeadConfigError, match=message):
        build()


def test_a_loaded_targets_modules_take_the_place_of_frozen_copies() -> None:
    """But an embedding that scales its rows is another function, and an output head of the draft's own stays."""
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "head_dim": 18}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **config))
    gemma = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(num_attention_heads=4, **config))
    head = small_heads.eagle_head()
    use_targets(head, llama)
    assert (head.embed_tokens, head.lm_head) == (llama.model.embed_tokens, llama.lm_head)
    head = small_heads.eagle_head()
    use_targets(head, gemma)
    assert isinstance(head.embed_tokens, FrozenEmbedding)
    head = small_heads.eagle3_head()
    own = head.lm_head
    use_targets(head, llama)
    assert (head.embed_tokens, head.lm_head) == (llama.model.embed_tokens, own)
