"""Quantised weights of a model that is being loaded: they stay in the file until they are packed.

transformers gets a tensor that takes the memory of one number for each (`stand_in`). `place` then puts a CodedLinear
where a linear is, which `pack` replaces, and decodes an embedding's rows from packed codes, which a tied head shares.
Not here: reading (weight_files), experts of mixtures (coded_experts), computing before they are packed (dequantising),
the order of replacements (lean, row_invariance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.errors import ModelRefused
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.model.row_kernels import CodeKernels, PackedCodes
from outrider.engine.model.weight_files import WeightReader
from outrider.kernels.linear.codes import Codes

# numbers; dequantised per step; bounds memory, at six bytes for each
_SLAB_NUMBERS = 16_000_000


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Returns zeros that take the memory of one number."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Waiting:
    """A weight that stays in the file until it is packed."""

    def __init__(self, path: str, name: str, shape: tuple[int, ...], read: Callable[[], Codes]) -> None:
        """Describes a weight of the model's shape [N, K] that `read` reads."""
        self._path, self._name, self._shape, self._read = path, name, shape, read

    def stand_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros of its shape that take the memory of one number."""
        return stand_in(self._shape, dtype)

    def codes(self) -> Codes:
        """Reads the codes. Raises ModelRefused if they do not have the model's shape."""
        found = self._read()
        if found.shape != self._shape:  # transformers saw the stand-in alone
            shapes = f"{self._name} has shape {list(found.shape)}, not {list(self._shape)}"
            raise ModelRefused(self._path, f"its weights do not fit its config: {shapes}")
        return found

    def of_outputs(self, *ranges: tuple[int, int]) -> Waiting:
        """Returns the weight of the outputs in half-open ranges, concatenated."""
        index = torch.cat([torch.arange(start, end) for start, end in ranges])
        return Waiting(self._path, self._name, (len(index), self._shape[1]), lambda: self.codes().rows(index))

    def of_inputs(self, start: int, end: int, uneven: set[str]) -> Waiting:
        """Returns the weight of the inputs [start, end).

        Reading it adds the weight's name to `uneven` if the whole weight can be packed but this part cannot, because
        its groups differ in size or are too small.
        """

        def read() -> Codes:
            whole = self.codes()
            part = whole.inputs(start, end)
            if whole.grouping is not None and part.grouping is None:
                uneven.add(self._name)
            return part

        return Waiting(self._path, self._name, (self._shape[0], end - start), read)


@dataclass(frozen=True)
class WaitingExperts:
    """The weights of all experts of a layer, in the place of the model's parameter until they are packed.

    shape: the parameter's, [E, N, K] or [E, K, N]. parts: each expert's weights [n, K], whose outputs are concatenated.
    sources: names of all these weights in the checkpoint. kernels: those that they are packed for.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Waiting, ...], ...]
    sources: tuple[str, ...]
    kernels: CodeKernels


class CodedLinear(torch.nn.Module):
    """Stands for an nn.Linear until it is packed. Its output is zeros: probes look at shapes and constants alone."""

    def __init__(
        self, linear: torch.nn.Linear, weight: Waiting, kernels: CodeKernels, packed: PackedCodes | None = None
    ) -> None:
        """Takes the linear's sizes and bias.

        kernels: those that the weight is packed for; packed: the weight, if it is packed already.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.kernels, self.packed = kernels, packed
        self.waiting = weight
        self.computes = False  # set by dequantising

    def codes(self) -> Codes:
        """Reads the codes. Raises ModelRefused."""
        return self.waiting.codes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.computes:
            return dequantised_linear(x, [self.waiting], self.bias)
        return x.new_zeros((*x.shape[:-1], self.out_features))

    def keep_outputs(self, start: int, end: int) -> None:
        """Keeps the outputs [start, end) only."""
        self.waiting, self.out_features = self.waiting.of_outputs((start, end)), end - start
        if self.packed is not None:
            self.packed = self.kernels.outputs(self.packed, start, end)
        if self.bias is not None:
            self.bias = torch.nn.Parameter(self.bias.detach()[start:end].clone(), requires_grad=False)

    def keep_inputs(self, start: int, end: int, uneven: set[str]) -> None:
        """Keeps the inputs [start, end) only, and the whole bias. uneven: as for of_inputs."""
        self.waiting, self.in_features, self.packed = self.waiting.of_inputs(start, end, uneven), end - start, None

    def plain(self, dtype: torch.dtype) -> torch.nn.Linear:
        """Returns the linear that it stands for, dequantised. Raises ModelRefused."""
        linear = torch.nn.Linear(self.in_features, self.out_features, bias=False, dtype=dtype)
        weight = self.codes().dequantised().to(self.kernels.device, dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = torch.nn.Parameter(self.bias.detach().to(dtype), requires_grad=False)
        return linear


def dequantised_linear(x: torch.Tensor, weights: Sequence[Waiting], bias: torch.Tensor | None) -> torch.Tensor:
    """Maps x [..., K] -> [..., N], the weights' concatenated outputs, in x's dtype; dequantises a slab at a time.

    Raises ModelRefused.
    """
    outputs = [
        torch.nn.functional.linear(x, slab.dequantised().to(x.dtype))
        for weight in weights
        for slab in _slabs(weight.codes())
    ]
    joined = torch.cat(outputs, -1)
    return joined if bias is None else joined + bias


def _slabs(codes: Codes) -> Iterator[Codes]:
    num_outputs, num_inputs = codes.shape
    for index in torch.split(torch.arange(num_outputs), max(1, _SLAB_NUMBERS // num_inputs)):
        yield codes.rows(index)


class RowInvariantCodes(RowInvariantLinear):
    """A linear on packed codes."""

    def __init__(self, packed: PackedCodes, bias: torch.Tensor | None, kernels: CodeKernels) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = packed.num_outputs, packed.num_inputs
        self.packed = packed
        self._linear = lambda x: kernels.linear(x, packed, bias)


class CodedRows(torch.Tensor):
    """The weight [N, K] of an embedding: F.embedding decodes rows of packed codes. Others see a stand-in."""

    packed: PackedCodes
    _kernels: CodeKernels

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.embedding and isinstance(args[1], CodedRows):
            return args[1]._kernels.rows(args[0], args[1].packed)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def wrap(cls, weight: torch.Tensor, packed: PackedCodes, kernels: CodeKernels) -> CodedRows:
        """Makes the stand-in `weight` a CodedRows with these packed codes."""
        wrapped = weight.detach().as_subclass(cls)
        wrapped.packed, wrapped._kernels = packed, kernels
        return wrapped


def waiting(path: str, skeleton: torch.nn.Module, readers: Mapping[str, WeightReader]) -> dict[str, Waiting]:
    """Maps a parameter's name to its weight, for plain linears and embeddings whose weights have codes.

    skeleton: the model on the meta device. Parameters that transformers merges or renames are not among them.
    """
    found = {}
    for name, module in skeleton.named_modules():
        reader = readers.get(f"{name}.weight")
        if reader is not None and reader.codes is not None and _takes(module):
            shape = tuple(module.get_parameter("weight").shape)
            found[f"{name}.weight"] = Waiting(path, f"{name}.weight", shape, reader.codes)
    return found


def _takes(module: torch.nn.Module) -> bool:
    is_linear = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    return is_linear or isinstance(module, torch.nn.Embedding)


def place(path: str, model: torch.nn.Module, weights: Mapping[str, Waiting], kernels: CodeKernels) -> None:
    """Replaces the stand-ins: a linear's by a CodedLinear, an embedding's by CodedRows, or by its weight where the
    kernels do not take its codes. Raises ModelRefused."""
    stand_ins = [model.get_parameter(name) for name in weights]  # kept, so that no other tensor gets the same id
    waiting_for = {id(parameter): weight for parameter, weight in zip(stand_ins, weights.values(), strict=True)}
    modules = [(name, module) for name, module in model.named_modules() if _takes(module)]
    shared: dict[int, PackedCodes] = {}
    for _, module in modules:
        key = id(module.weight)
        if isinstance(module, torch.nn.Embedding) and key in waiting_for:
            codes, dtype = waiting_for[key].codes(), module.weight.dtype
            if not kernels.takes_together([codes]):
                plain = codes.dequantised().to(kernels.device, dtype)
                module.weight = torch.nn.Parameter(plain, requires_grad=False)
                continue
            shared[key] = kernels.pack([codes])
            # Not a parameter: no .to() of the model moves it.
            own = stand_in(tuple(module.weight.shape), dtype, kernels.device)
            rows = CodedRows.wrap(own, shared[key], kernels)
            del module.weight
            module.weight = rows
    for name, module in modules:
        key = id(module.weight)
        if isinstance(module, torch.nn.Linear) and key in waiting_for:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, CodedLinear(module, waiting_for[key], kernels, shared.get(key)))
    left = [name for name, parameter in model.named_parameters() if id(parameter) in waiting_for]
    if left:
        raise ModelRefused(path, f"its weight {left[0]} is quantised, and read by a module that cannot read codes")


def pack(linears: Sequence[CodedLinear]) -> RowInvariantLinear:
    """Returns one linear with their concatenated outputs.

    It is on their codes if they can be packed together, else dequantised. Raises ModelRefused.
    """
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias, kernels = torch.cat(biases) if biases else None, linears[0].kernels
    shared = linears[0].packed if len(linears) == 1 else None
    if shared is not None:
        return RowInvariantCodes(shared, bias, kernels)
    return pack_codes([linear.codes() for linear in linears], bias, kernels)


def pack_codes(codes: Sequence[Codes], bias: torch.Tensor | None, kernels: CodeKernels) -> RowInvariantLinear:
    """Returns one linear with the weights' concatenated outputs.

    It is on their codes if they can be packed together, else dequantised. bias: that of all outputs.
    """
    if kernels.takes_together(codes):
        return RowInvariantCodes(kernels.pack(codes), bias, kernels)
    weight = torch.cat([part.dequantised().bfloat16() for part in codes]).to(kernels.device)
    return RowInvariantLinear(weight, bias, kernels.backend)


def code_kinds(model: torch.nn.Module) -> list[str]:
    """Returns the kinds of codes that the model's linears multiply, sorted; empty if no weight is packed."""
    return sorted(
        {kind for part in model.modules() if isinstance(part, RowInvariantCodes) for kind in part.packed.kinds}
    )
