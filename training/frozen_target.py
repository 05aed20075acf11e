"""The target in training: frozen, run by transformers, with hooks on the hidden layers that heads read.

Not the engine: no paged cache, no row invariance. Hidden layers have HF's numbers: 0 is the embedding's output, L the
residual stream after layer L-1, and num_layers the final norm's output, which the target's output head reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.engine.errors import ModelRefused
from outrider.engine.model import guards as model_guards
from outrider.engine.model.weights import read_weights
from outrider.training.errors import SettingError
from outrider.training.heads.interface import Batch, TargetView
from outrider.training.heads.read_out import read_out_logits


class FrozenTarget:
    """A causal LM checkpoint, dequantised as the engine does; `view` runs it.

    dtype: "auto": the engine's choice. Raises SettingError when it cannot be loaded or has no layer list.
    """

    def __init__(self, path: Path, dtype: torch.dtype | str = "auto", device: str = "cpu") -> None:
        self.path = path
        self.model = _load(path, dtype, torch.device(device))
        self.config: Any = self.model.config.get_text_config()
        self.num_layers = int(self.config.num_hidden_layers)
        self.hidden_size = int(self.config.hidden_size)
        self.vocab_size = int(self.config.vocab_size)
        self._body = self.model.base_model
        self._layers = _layer_list(path, self._body, self.num_layers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def embedding(self) -> torch.Tensor:
        """Returns the embedding [vocab, H], frozen."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> torch.Tensor:
        """Returns the output head [vocab, H], frozen; the embedding itself if they are tied."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def view(self, token_ids: torch.Tensor, feature_layers: Sequence[int]) -> TargetView:
        """Runs the target over `token_ids` int64[B, T]. Rows may be padded on the right with any id.

        Attention is causal, so padding does not affect earlier positions and no mask is needed.
        Raises SettingError for a layer that the target does not have.
        """
        unknown = [layer for layer in feature_layers if not 0 <= layer <= self.num_layers]
        if unknown:
            raise SettingError(f"{self.path} has hidden layers 0 to {self.num_layers}, not {unknown}")
        captured: dict[int, torch.Tensor] = {}
        hooks = [self._hook(layer, captured) for layer in {*feature_layers, self.num_layers}]
        try:
            self._body(input_ids=token_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        features = [captured[layer] for layer in feature_layers or (self.num_layers,)]
        return TargetView(torch.cat(features, dim=-1), captured[self.num_layers], self._read_out, self.vocab_size)

    def view_of(self, batch: Batch, feature_layers: Sequence[int]) -> TargetView:
        """Views a batch: by its recorded hidden states, or by running the target over it."""
        if batch.rows is None:
            return self.view(batch.token_ids, feature_layers)
        rows = batch.rows.float().view(*batch.token_ids.shape, -1, self.hidden_size)
        places = [batch.row_layers.index(layer) for layer in feature_layers or (self.num_layers,)]
        return TargetView(rows[..., places, :].flatten(-2), rows[..., -1, :], self._read_out, self.vocab_size)

    @torch.no_grad()
    def _read_out(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        return read_out_logits(self.model, hidden, token_ids)

    def _hook(self, layer: int, captured: dict[int, torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
        def keep_output(_module: nn.Module, _inputs: object, output: Any) -> None:
            captured[layer] = _hidden_of(output)

        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured[layer] = args[0] if args else kwargs["hidden_states"]

        handle: torch.utils.hooks.RemovableHandle
        if layer == self.num_layers:
            handle = self._body.register_forward_hook(keep_output)
        else:
            handle = self._layers[layer].register_forward_pre_hook(keep_input, with_kwargs=True)
        return handle


def _hidden_of(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
    return hidden


def require_checkpoint(option: str, path: Path) -> None:
    """Raises SettingError unless `path` is a folder with a config: transformers would try the network."""
    if not (path / "config.json").is_file():
        raise SettingError(f"{option} {path} is not a checkpoint folder (no config.json)")


def _load(path: Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    require_checkpoint("--target", path)
    name = str(path)
    try:
        config = model_guards.read_config(name)
        model_guards.require_supported_architecture(name, config)
        model_guards.require_weight_files(name)
        if isinstance(dtype, str):
            dtype = model_guards.resolve_dtype(name, config, dtype)
        return read_weights(name, config, dtype, device, for_engine=False)
    except ModelRefused as refusal:
        raise SettingError(f"--target {path} cannot be loaded: {refusal}") from refusal


def _layer_list(path: Path, body: nn.Module, num_layers: int) -> nn.ModuleList:
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise SettingError(f"{path}: no list of {num_layers} decoder layers found in {type(body).__name__}")
