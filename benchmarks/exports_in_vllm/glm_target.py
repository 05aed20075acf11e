"""The demo target in GLM-4.5's layout: the same function, for which `outrider train` can make an MTP layer.

GLM-4.5 without norms of queries and keys and with rotation of whole heads is a Llama, if its layers are dense or their
routed experts are zeros. vLLM refuses one without experts, so the last layer has them: its MLP is the shared expert.
It leaves the output head without weights where the file has it tied, so the head is a copy of the embedding.
vLLM runs that on a CPU, other than hybrids with an MTP layer.
Run: `python -m benchmarks.exports_in_vllm.glm_target FOLDER`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM

from outrider.shared.errors import OutriderError
from outrider.training.export import TOKENIZER_FILES, copy_files

_DEMO_TARGET = Path(__file__).parents[2] / "models" / "demo-target"
# logits; of the two models in float32, where only the order of sums may differ
_LARGEST_DIFFERENCE = 1e-3
# of the last layer and the MTP layer: as few and small as vLLM's kernels take
_EXPERT_SIZE = 128
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": _EXPERT_SIZE,
    "n_group": 1,
    "topk_group": 1,
}


def glm_config(source: LlamaForCausalLM) -> Glm4MoeConfig:
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    theta = source.config.rope_parameters["rope_theta"]
    return Glm4MoeConfig(
        **{name: getattr(source.config, name) for name in kept},
        **_EXPERTS,
        n_shared_experts=-(-source.config.intermediate_size // _EXPERT_SIZE),
        first_k_dense_replace=source.config.num_hidden_layers - 1,
        tie_word_embeddings=False,
        use_qk_norm=False,
        attention_bias=False,
        partial_rotary_factor=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
        num_nextn_predict_layers=0,
    )


@torch.no_grad()
def copy_weights(source: LlamaForCausalLM, model: Glm4MoeForCausalLM) -> None:
    """The last MLP becomes the shared expert, filled up with zeros; routed experts are zeros."""
    model.load_state_dict(source.state_dict(), strict=False)
    dense, sparse = source.model.layers[-1].mlp, model.model.layers[-1].mlp
    for parameter in sparse.parameters():
        parameter.zero_()
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(dense, name).weight
        getattr(sparse.shared_experts, name).weight[: weight.shape[0], : weight.shape[1]] = weight


@torch.no_grad()
def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    target: Annotated[Path, typer.Option(help="A Llama.")] = _DEMO_TARGET,
) -> None:
    """Example: python -m benchmarks.exports_in_vllm.glm_target .run/glm"""
    source = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model = Glm4MoeForCausalLM(glm_config(source)).eval()
    copy_weights(source, model)
    token_ids = torch.arange(64)[None] * 31 % source.config.vocab_size
    difference = float((source(input_ids=token_ids).logits - model(input_ids=token_ids).logits).abs().max())
    if difference > _LARGEST_DIFFERENCE:
        raise OutriderError(f"{target}: its logits in GLM-4.5's layout differ by {difference:.2g}")
    model.to(torch.bfloat16).save_pretrained(out)  # under the published names, an expert at a time
    copy_files(target, out, (*TOKENIZER_FILES, "generation_config.json"))
    typer.echo(f"{out}: logits differ by at most {difference:.2g}")


if __name__ == "__main__":
    typer.run(main)
