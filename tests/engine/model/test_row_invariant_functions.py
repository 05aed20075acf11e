"""A row's bits through an elementwise function: alone, among other rows, and for every function of the kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SERVED, save_tiny_model
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outrider.engine.model.load import load_model
from outrider.engine.model.row_invariant_functions import WholeVectorFunctions
from outrider.engine.model.row_invariant_modules import RowInvariantLinear

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "torch.sigmoid": torch.sigmoid,
    "sigmoid": lambda x: x.sigmoid(),
    "F.sigmoid": functional.sigmoid,
    "expit": torch.special.expit,
    "F.silu": functional.silu,
    "F.softplus": functional.softplus,
    "F.softplus, beta": lambda x: functional.softplus(x, 0.5, threshold=3),
    "F.gelu": functional.gelu,
    "F.gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "F.mish": functional.mish,
    "F.elu": lambda x: functional.elu(x, alpha=0.7),
    "F.selu": functional.selu,
    "F.celu": functional.celu,
    "exp2": torch.exp2,
    "by keyword": lambda x: torch.sigmoid(input=x),
    # Of functions that are not in the mode's table.
    "exp": torch.exp,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "F.logsigmoid": functional.logsigmoid,
    "F.hardswish": functional.hardswish,
    "F.relu": functional.relu,
}
IN_PLACE: dict[str, Function] = {
    "sigmoid_": lambda x: x.sigmoid_(),
    "F.silu": lambda x: functional.silu(x, inplace=True),
    "F.elu_": functional.elu_,
    "F.selu": lambda x: functional.selu(x, True),
}
WIDTHS = (1, 4, 6, 16, 48, 100)
NUM_ROWS = 300


def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    return 3 * torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(width)).to(dtype)


def num_moved(function: Function, x: torch.Tensor) -> int:
    """Rows whose bits are others alone than among all."""
    whole = function(x.clone())
    return sum(not torch.equal(function(x[row : row + 1].clone()), whole[row : row + 1]) for row in range(NUM_ROWS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rows_bits_are_its_own(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        with WholeVectorFunctions():
            assert num_moved(FUNCTIONS[name], rows(width, dtype)) == 0, width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_values_are_the_functions(name: str, dtype: torch.dtype) -> None:
    x = rows(7, dtype)
    with WholeVectorFunctions():
        found = FUNCTIONS[name](x)
    torch.testing.assert_close(found, FUNCTIONS[name](x))
    assert found.shape == x.shape


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_written(name: str) -> None:
    for width in WIDTHS:
        x = rows(width, torch.float32)
        with WholeVectorFunctions():
            assert num_moved(IN_PLACE[name], x) == 0
            found = x.clone()
            assert IN_PLACE[name](found) is found
        torch.testing.assert_close(found, IN_PLACE[name](x.clone()))


def test_scalars_strided_rows_and_no_rows() -> None:
    with WholeVectorFunctions():
        assert torch.sigmoid(torch.tensor(0.0)) == 0.5
        assert torch.sigmoid(torch.empty(0, 4)).shape == (0, 4)
        x = rows(12, torch.float32)
        assert torch.equal(torch.sigmoid(x[:, ::3]), torch.sigmoid(x)[:, ::3])


def test_torch_alone_does_move_bits() -> None:
    """The tests above can fail: without the mode a sigmoid of odd width does."""
    assert num_moved(torch.sigmoid, rows(6, torch.float32)) > 0


@pytest.mark.parametrize(("name", "runs"), [("llama", False), ("gpt_oss", False), ("mixtral", False), ("afmoe", True)])
def test_only_models_that_call_such_functions_pay_for_it(name: str, runs: bool, tmp_path: Path) -> None:
    """gpt-oss calls torch.sigmoid in its experts, which are in whole vectors anyway."""
    loaded = load_model(str(save_tiny_model(*SERVED[name], tmp_path)))
    assert ("forward" in vars(loaded.model)) == runs


class CountedCalls(TorchFunctionMode):
    """num_calls: of torch's functions that a mode sees."""

    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "leaves"), [("llama", False), ("afmoe", True)])
def test_modules_of_ours_leave_the_mode(name: str, leaves: bool, tmp_path: Path) -> None:
    """They are row-invariant by themselves, and most calls of a forward are theirs."""
    loaded = load_model(str(save_tiny_model(*SERVED[name], tmp_path)), dtype="float32")
    linears = [module for module in loaded.model.modules() if isinstance(module, RowInvariantLinear)]
    linear = linears[0] if name == "llama" else next(module for module in linears if "forward" in vars(module))
    x = torch.ones(1, 3, linear.in_features)
    with torch.inference_mode(), CountedCalls() as counted:
        linear(x)
    assert (counted.num_calls == 0) == leaves
