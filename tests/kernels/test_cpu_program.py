"""Recorded programs: the same bits on other data, whatever lies between the kernels; and what must not be recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.program.arena import Arena, ArenaFull
from outrider.kernels.cpu.program.recorder import NotRecordable, Recorder
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.gated_activation.cpu import gated_activation
from outrider.kernels.linear.int8 import cpu_tiles, reference
from outrider.kernels.rms_norm.cpu import rms_norm

WIDTH = 1024
ROWS = 160  # so many that the gate runs on a team
WEIGHT = torch.linspace(0.5, 1.5, WIDTH).bfloat16()
TABLE = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """As in every forward of a served model."""
    with torch.inference_mode():
        yield


def _layer(x: torch.Tensor) -> torch.Tensor:
    inner = rms_norm(x, WEIGHT, 1e-5, one_plus_weight=False, rounds_first=True)
    return x + gated_activation(inner, x, "silu")


def _all_kernels(indices: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.embedding(indices, TABLE)
    for _ in range(3):
        x = _layer(x)
    return x[None][:, torch.arange(4)][0].float()


def _with_operations_of_torch(indices: torch.Tensor) -> torch.Tensor:
    x = _layer(TABLE[indices].tanh() * 3.0)
    x[1:3] += 1.0
    low, high = x.chunk(2, dim=1)
    halves = torch.stack([low.mul(0.5), high], dim=1).amax(dim=1)
    return torch.cat([halves.double(), torch.ones(x.shape[0], 1).cumsum(0)], dim=1)


def _record(
    function: Callable[[torch.Tensor], torch.Tensor], indices: torch.Tensor, arena: Arena
) -> tuple[Callable[[], None], torch.Tensor]:
    recorder = Recorder(arena, torch.get_num_threads())
    with cpu_team.recording(recorder), recorder:
        output = function(indices)
    return recorder.recorded(), output


def _indices(seed: int) -> torch.Tensor:
    return torch.randint(50, (ROWS,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", [_all_kernels, _with_operations_of_torch])
def test_other_data_give_the_bits_of_a_plain_run(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    static = _indices(0)
    run, output = _record(function, static, Arena(1 << 26))
    assert torch.equal(output, function(_indices(0)))
    for seed in (1, 2, 1):
        static.copy_(_indices(seed))
        run()
        assert torch.equal(output, function(_indices(seed)))


def test_programs_share_an_arena() -> None:
    arena = Arena(1 << 22)
    statics = [_indices(seed)[: 20 + seed] for seed in range(8)]
    runs = [_record(_all_kernels, static, arena)[0] for static in statics]
    kept = [torch.empty(0)] * 8
    for place, static in enumerate(statics):
        # Recorded anew: only a recording's own output says where it lies.
        runs[place], output = _record(_all_kernels, static, arena)
        static.copy_(_indices(100 + place)[: 20 + place])
        runs[place]()
        kept[place] = output.clone()
    assert all(torch.equal(kept[place], _all_kernels(statics[place])) for place in range(8))


def test_more_threads_than_cores_change_no_bit() -> None:
    static = _indices(3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        run, output = _record(_all_kernels, static, Arena(1 << 26))
        expected = output.clone()
        for _ in range(20):
            output.zero_()
            run()
            assert torch.equal(output, expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: x * x[0].item(),
        torch.unique,
        lambda x: x[x > 3],
        lambda x: x if x.any() else -x,
    ],
    ids=["nonzero", "item", "unique", "mask", "branch"],
)
def test_what_depends_on_data_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(NotRecordable):
        _record(function, _indices(0), Arena(1 << 20))


def test_an_error_of_a_kernel_comes_out_of_the_program() -> None:
    static = _indices(0)
    run, output = _record(_all_kernels, static, Arena(1 << 26))
    static[7] = 50
    with pytest.raises(KernelArgumentError, match="outside the table"):
        run()
    static.copy_(_indices(5))
    run()
    assert torch.equal(output, _all_kernels(_indices(5)))


def test_an_arena_gives_places_again() -> None:
    arena = Arena(1 << 12)
    first = arena.tensor((2, 16), (16, 1), torch.float32)
    address = first.data_ptr()
    view = first[1]
    del first
    second = arena.tensor((2, 16), (16, 1), torch.float32)
    assert second.data_ptr() != address, "a view still holds it"
    del view
    third = arena.tensor((4, 4), (1, 4), torch.float32)
    assert (third.data_ptr(), third.stride(), address % 64) == (address, (1, 4), 0)
    borrowed = arena.borrowed(third[1:])
    assert (borrowed.data_ptr(), borrowed.shape, borrowed.stride()) == (address + 4, (3, 4), (1, 4))
    del third
    assert arena.tensor((16,), (1,), torch.float32).data_ptr() == address, "a borrower has no claim"
    with pytest.raises(ArenaFull):
        arena.tensor((2000,), (1,), torch.float32)


def test_working_memory_of_another_size_lies_elsewhere() -> None:
    """A thread that is late with one call must not meet another one that works on the next."""
    arena = Arena(1 << 12)
    small, large = arena.scratch(64, 3), arena.scratch(256, 3)
    assert small + 3 * 64 <= large or large + 3 * 256 <= small
    assert (small % 64, arena.scratch(64, 3), arena.scratch(256, 3)) == (0, small, large)
    assert Recorder(arena, 1).scratch(64, 3) == Recorder(arena, 3).scratch(64, 1) == small


def test_a_recording_that_does_not_fit_says_so() -> None:
    with pytest.raises(ArenaFull):
        _record(_all_kernels, _indices(0), Arena(1 << 12))


@pytest.mark.parametrize("torchs_own", [False, True])
def test_a_program_can_end_at_each_of_its_cuts(torchs_own: bool) -> None:
    """What is before the cut has other data's bits, what is behind it has not run."""

    def between(x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if torchs_own else x

    def parts(indices: torch.Tensor, cut: Callable[[], None]) -> list[torch.Tensor]:
        outputs = [torch.nn.functional.embedding(indices, TABLE)]
        for _ in range(3):
            cut()
            outputs.append(_layer(between(outputs[-1])))
        return outputs

    static = _indices(0)
    recorder = Recorder(Arena(1 << 26), torch.get_num_threads())
    with cpu_team.recording(recorder), recorder:
        outputs = parts(static, recorder.cut)
    runs = recorder.recorded_to_cuts()
    assert len(runs) == 4
    for seed, end in ((1, 2), (2, 0), (3, 3), (4, 1), (5, 2)):
        static.copy_(_indices(seed))
        before = [output.clone() for output in outputs]
        runs[end]()
        expected = parts(_indices(seed), lambda: None)
        for place, (output, old) in enumerate(zip(outputs, before, strict=True)):
            assert torch.equal(output, expected[place] if place <= end else old), (seed, place)


def test_an_error_is_told_once() -> None:
    """A shorter run later does not clear what a longer one reported."""
    static = torch.tensor([1, 2, 3])
    recorder = Recorder(Arena(1 << 22), 1)
    with cpu_team.recording(recorder), recorder:
        torch.nn.functional.embedding(torch.tensor([4]), TABLE)
        recorder.cut()
        torch.nn.functional.embedding(static, TABLE)
    shorter, whole = recorder.recorded_to_cuts()
    static[1] = 99
    with pytest.raises(KernelArgumentError, match="outside the table"):
        whole()
    shorter()


def test_a_compiled_units_digest_covers_modules_that_give_it_constants_alone() -> None:
    sources = cpu_team._sources(cpu_tiles.run_panel.__module__, {})
    assert {cpu_tiles.__name__, reference.__name__, "outrider.kernels.cpu.emitters"} <= set(sources)
