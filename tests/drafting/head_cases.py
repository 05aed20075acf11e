"""Small heads of every kind, a method over each, and the target's hidden states: for the tests of drafting."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from outrider.drafting.growth.draft import BEAM_WIDTH
from outrider.drafting.heads.assistant import AssistantConfig, AssistantHead
from outrider.drafting.heads.block import BlockConfig, BlockHead
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafting.heads.frozen import FrozenEmbedding, FrozenLinear
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from outrider.drafting.heads.mtp import MtpConfig, MtpHead
from outrider.drafting.methods.assistant import AssistantNet, PagedAssistant
from outrider.drafting.methods.block import BlockNet
from outrider.drafting.methods.eagle import EagleNet
from outrider.drafting.methods.growing import MAX_TREE_NODES, GrowingMethod
from outrider.drafting.methods.medusa import MedusaNet
from outrider.drafting.methods.mlp_speculator import MlpSpeculatorNet
from outrider.drafting.methods.parallel_eagle import ParallelEagleNet
from outrider.drafting.paged.head_forward import HeadForward, recorded_chains
from outrider.drafting.paged.paged_block import BlockChains, PagedBlock
from outrider.drafting.paged.paged_head import PagedHead
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model.row_invariance import make_row_invariant
from outrider.engine.sampling.device_chains import DeviceChains
from outrider.shared.messages import DraftMethodInfo, DraftStep, HiddenStates, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

VOCAB_SIZE, HIDDEN = 50, 32
NUM_TARGET_LAYERS = 6
DECODER = DecoderConfig(
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=VOCAB_SIZE,
)
# What the kernels that stand in for the head's own modules take, so that its forwards are recorded.
WIDE = dataclasses.replace(DECODER, head_dim=32)
KINDS = (
    "eagle",
    "eagle two layers",
    "eagle3",
    "eagle3 small vocabulary",
    "eagle3 one layer twice",
    "mtp",
    "eagle3 parallel",
    "assistant",
    "medusa",
    "mlp",
    "mlp tied",
    "dflash",
    "dflash causal sliding small vocabulary",
    "dspark",
    "dspark gated two layers",
    "dspark rnn",
)
BLOCKS = KINDS[-5:]
ONE_PASS_HEADS = ("eagle3 parallel", *BLOCKS)
RECORDED = KINDS[:6]
RECURRENT = (*KINDS[:8], *BLOCKS)  # those with a cache of their own
_WINDOW = 6  # positions, of the sliding block head
# The one-layer model of an MTP head; of a class whose modules all have a lean replacement, so that it is recorded.
_MTP_LAYER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


# The layers of Gemma 4 that an assistant attends to are the target's second and fourth.
_GEMMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": None,
}
_TARGET_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
_ASSISTANT_LAYERS = ["sliding_attention", "full_attention"]


def _assistant(attention: str) -> AssistantHead:
    register_attention()
    target = transformers.Gemma4TextConfig(**_GEMMA, num_hidden_layers=4, layer_types=_TARGET_LAYERS)
    layers = transformers.Gemma4TextConfig(**_GEMMA, num_hidden_layers=2, layer_types=_ASSISTANT_LAYERS)
    bodies = [transformers.AutoModel.from_config(of, attn_implementation=attention) for of in (layers, target)]
    embedding = FrozenEmbedding(torch.randn(VOCAB_SIZE, HIDDEN))
    config = AssistantConfig(target, layers, num_centroids=5, top_centroids=3)
    return AssistantHead(config, *bodies, embedding=embedding, token_ordering=torch.randperm(VOCAB_SIZE))


def build_head(kind: str, attention: str, decoder: DecoderConfig = DECODER) -> Any:
    torch.manual_seed(KINDS.index(kind))
    embedding, lm_head = torch.randn(VOCAB_SIZE, HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN)
    target: dict[str, Any] = {"embedding": embedding, "lm_head": lm_head, "attn_implementation": attention}
    if kind.startswith("eagle3"):
        small = kind.endswith("vocabulary")
        layers = (3, 1, 3) if kind.endswith("twice") else (1, 3, 5)
        mask_token_id = 7 if kind.endswith("parallel") else None
        sizes = {"draft_vocab_size": 20 if small else 0, "mask_token_id": mask_token_id}
        config = Eagle3Config(decoder, feature_layers=layers, **sizes)
        d2t = torch.sort(torch.randperm(VOCAB_SIZE)[:20]).values - torch.arange(20) if small else None
        head: Any = Eagle3Head(config, **(target | {"lm_head": None}), d2t=d2t)
    elif kind in BLOCKS:
        head = _block_head(kind, decoder, target)
    elif kind == "mtp":
        register_attention()
        layer = transformers.LlamaConfig(**_MTP_LAYER, head_dim=decoder.head_dim, attn_implementation=attention)
        ends = {"embedding": FrozenEmbedding(embedding), "lm_head": FrozenLinear(lm_head)}
        head = MtpHead(MtpConfig(layer, NUM_TARGET_LAYERS), transformers.LlamaModel(layer), **ends)
    elif kind.startswith("eagle"):
        layers = 2 if "two" in kind else 1
        decoder = dataclasses.replace(decoder, num_hidden_layers=layers)
        head = EagleHead(EagleConfig(decoder, NUM_TARGET_LAYERS), **target)
    elif kind == "assistant":
        head = _assistant(attention)
    elif kind == "medusa":
        head = MedusaHeads(MedusaConfig(HIDDEN, VOCAB_SIZE, num_heads=4))
    else:
        head = MlpSpeculator(MlpSpeculatorConfig(VOCAB_SIZE, HIDDEN, n_predict=4, tie_weights="tied" in kind))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return head.eval()


def _block_head(kind: str, decoder: DecoderConfig, target: dict[str, Any]) -> BlockHead:
    small, layers = kind.endswith("vocabulary"), 2 if "two" in kind else 1
    d2t = torch.sort(torch.randperm(VOCAB_SIZE)[:20]).values - torch.arange(20) if small else None
    config = BlockConfig(
        dataclasses.replace(decoder, model_type="qwen3", num_hidden_layers=layers),
        feature_layers=(1, 3, 5),
        block_size=4 if "dspark" in kind else 5,
        mask_token_id=7,
        causal=("causal" in kind or "two" in kind,) * (layers - 1) + ("causal" in kind or "rnn" in kind,),
        predicts_from_anchor="dspark" in kind,
        sliding_window=_WINDOW if "sliding" in kind else None,
        sliding=("sliding" in kind,) * layers,
        draft_vocab_size=20 if small else 0,
        markov_rank=16 if "dspark" in kind else 0,
        markov_kind=next((found for found in ("gated", "rnn") if found in kind), "vanilla"),
        has_lm_head=small,
    )
    return BlockHead(config, **(target | ({"lm_head": None} if small else {})), d2t=d2t)


def _block_logits(
    head: BlockHead, token_ids: Sequence[int], features: torch.Tensor, path: Sequence[int], num_tokens: int
) -> torch.Tensor:
    """The logits [draft vocabulary] after a draft path: a block over the whole context, by the head's own modules."""
    num_context, num_rows = len(features), head.config.num_block_rows(num_tokens)
    block = torch.tensor([[token_ids[-1], *[head.config.mask_token_id] * (num_rows - 1)]])
    positions = torch.tensor([[*range(num_context, num_context + num_rows), *range(num_context)]])
    total = num_rows + num_context

    def attention(is_causal: bool) -> dict[str, torch.Tensor]:
        sees = torch.zeros(total, total, dtype=torch.bool)
        sees[:num_rows, num_rows:] = True
        sees[:num_rows, :num_rows] = torch.ones(num_rows, num_rows).tril().bool() if is_causal else True
        if head.config.sliding_window is not None:
            sees &= positions[0, None] > positions[0, :, None] - head.config.sliding_window
        sees[range(num_rows, total), range(num_rows, total)] = True
        return {"attention_mask": torch.where(sees, 0.0, float("-inf"))[None, None]}

    outputs = head(block, head.fuse(features)[None], positions, attention)[0]
    state = None
    for depth, token in enumerate([token_ids[-1], *path]):
        row = outputs[head.config.num_silent_rows + depth][None]
        logits, state = head.biased(head.lm_head(row), row, torch.tensor([token]), state)
    return logits[0]


class Case:
    """A method over a head, and the same head for the oracle."""

    def __init__(
        self,
        kind: str,
        kv_cache_bytes: int = 2**20,
        *,
        backend: str = "cpu",
        device: torch.device | str = "cpu",
        draws: bool = False,
        decoder: DecoderConfig = DECODER,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """draws: plain chains are drawn on the device, or on the CPU in recorded programs, which takes wide heads."""
        self.kind = kind
        self.oracle = build_head(kind, "eager", decoder)
        served = copy.deepcopy(build_head(kind, ATTENTION_NAME, decoder)).to(device, dtype)
        target_ids = getattr(served, "target_ids", None)
        vocabulary = TargetVocabulary(VOCAB_SIZE, target_ids)
        self.feature_layers = tuple(getattr(served, "feature_layers", (NUM_TARGET_LAYERS,)))
        self.layers = tuple(dict.fromkeys(self.feature_layers))
        self.target_ids = None if target_ids is None else target_ids.tolist()
        ops = resolve_attention_ops(backend, torch.device(device))
        if kind == "assistant":
            self.paged: PagedHead = PagedAssistant(
                served, ops, dtype, kv_cache_bytes=kv_cache_bytes, block_size=4, device=device
            )
            net: Any = AssistantNet(self.paged, vocabulary, prefill_chunk_size=16)
        elif kind in BLOCKS:
            memory = {"kv_cache_bytes": kv_cache_bytes, "block_size": 4, "device": device}
            self.paged = PagedBlock(served, ops, dtype, **memory, graphs=draws)
            net = BlockNet(
                self.paged, vocabulary, prefill_chunk_size=16, chains=BlockChains(self.paged) if draws else None
            )
        elif kind in RECURRENT:
            self.paged = PagedHead(
                served, ops, dtype, kv_cache_bytes=kv_cache_bytes, block_size=4, device=device,
                graphs=draws and backend == "cpu",
            )  # fmt: skip
            chains: Any = None
            if draws and backend == "cpu":
                chains = recorded_chains(self.paged)
            elif draws:
                chains = DeviceChains(HeadForward(self.paged, vocabulary, graphs=True))
            net_of = ParallelEagleNet if kind.endswith("parallel") else EagleNet
            net = net_of(self.paged, vocabulary, prefill_chunk_size=16, chains=chains)
        else:
            make_row_invariant(served, ops.row_backend)
            net_type = MedusaNet if kind == "medusa" else MlpSpeculatorNet
            net = net_type(served, vocabulary, torch.float32, device)
        info = DraftMethodInfo(kind, max_num_draft_tokens=4, hidden_layers=self.layers, proposes_trees=True)
        self.method = GrowingMethod(
            net,
            info,
            eos_token_ids=(),
            grammars=None,  # type: ignore[arg-type]
            draw_chains=net.draw_chains if draws else None,
            beam_width=MAX_TREE_NODES if kind in ONE_PASS_HEADS else BEAM_WIDTH,
        )

    def open(
        self, prompt: Sequence[int], params: SamplingParams, mode: SpeculationMode, *, session_id: str = "s"
    ) -> DraftSession:
        spec = SessionSpec(session_id, 1, tuple(prompt), (), params, mode, stream_key=9)
        session = DraftSession(spec, list(prompt), lambda _reply: None)
        self.method.open(session)
        return session

    def report(self, session: DraftSession, target: Target, committed: Sequence[int], first: int, step: int) -> None:
        """Commits tokens and sends the rows from output index `first` on."""
        base_len = session.committed_len
        session.report(
            DraftStep(
                1,
                base_len,
                tuple(committed),
                step,
                hidden_states=(target.rows(first, base_len + len(committed) - 1),),
            )
        )
        while self.method.advance(session):
            pass

    def logits(
        self, token_ids: Sequence[int], features: torch.Tensor, path: Sequence[int], num_tokens: int = 4
    ) -> np.ndarray:
        """float [V] after the committed tokens and a path of a draft of num_tokens, by the oracle."""
        with torch.inference_mode():
            if self.kind == "assistant":
                row = self._assistant_logits([token_ids[-1], *path], features)
            elif self.kind == "medusa":
                row = self.oracle(features[-1:])[0, len(path)]
            elif self.kind.startswith("mlp"):
                state = self.oracle.start(features[-1:])
                for depth, token in enumerate([token_ids[-1], *path]):
                    state, rows = self.oracle.step(state, torch.tensor([token]), depth)
                row = rows[0]
            elif self.kind in BLOCKS:
                row = _block_logits(self.oracle, token_ids, features, path, num_tokens)
            else:
                inputs = self.oracle.fuse(features)[None]
                tokens = list(token_ids[1:])
                if self.kind.endswith("parallel"):
                    mask = self.oracle.fuse(self.oracle.mask_hidden)[None, None].expand(1, len(path), -1)
                    inputs, tokens, path = torch.cat((inputs, mask), dim=1), [*tokens, *[7] * len(path)], []
                for token in [*path, None]:
                    positions = torch.arange(len(tokens))[None]
                    out = self.oracle(torch.tensor([tokens]), inputs, positions)[0, -1]
                    if token is not None:
                        inputs = torch.cat((inputs, out[None, None]), dim=1)
                        tokens.append(token)
                row = self.oracle.logits(out[None])[0]
        if self.target_ids is None:
            return row.numpy()
        full = np.full(VOCAB_SIZE, -np.inf)
        full[self.target_ids] = row.numpy()
        return full

    def _assistant_logits(self, token_ids: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """Logits after the tokens, whose first follows the features' position: all are at the position after it."""
        length = len(features)
        computed = self.oracle.keys_and_values(features, torch.arange(length))
        shared = {name: tuple(part.transpose(0, 1)[None] for part in parts) for name, parts in computed.items()}
        seen = torch.arange(length) >= length - _GEMMA["sliding_window"]  # type: ignore[operator]
        masks = {"full_attention": None, "sliding_attention": torch.where(seen, 0.0, -torch.inf)[None, None, None]}
        feature, position = features[-1:, -HIDDEN:], torch.tensor([[length]])
        for token in token_ids:
            found = self.oracle(torch.tensor([[token]]), feature[None], position, shared, masks)[0]
            feature = self.oracle.post_projection(found)
        return self.oracle.logits(found)[0]  # type: ignore[no-any-return]


class Target:
    """Hidden states of every position of one session: random, as good as any."""

    def __init__(self, case: Case, prompt_len: int, seed: int) -> None:
        self.layers, self.prompt_len = case.layers, prompt_len
        self.order = [case.layers.index(layer) for layer in case.feature_layers]
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn((len(case.layers), 300, HIDDEN), generator=generator)

    def rows(self, first: int, end: int) -> HiddenStates:
        part = self.states[:, self.prompt_len + first : self.prompt_len + end].contiguous()
        return HiddenStates(first, self.layers, part.shape[1], HIDDEN, "float32", part.numpy().tobytes())

    def features(self, start: int, end: int) -> torch.Tensor:
        """[end - start, layers * H] of absolute positions."""
        return self.states[self.order, start:end].transpose(0, 1).reshape(end - start, -1)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
