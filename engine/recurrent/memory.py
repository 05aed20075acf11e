"""Sizes a cache, and divides its memory between KV blocks and the slots of recurrent states. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.errors import ConfigError

FLAG = "--kv-cache-mb"
# MiB; of the KV cache on a CPU: its memory is shared with everything else on the machine
CPU_CACHE_MB = 512
# bytes; of a GPU's memory, for what a forward computes in, its graphs and partial attention (at most 256 MiB of it)
_WORKSPACE_BYTES = 1 << 30
# slots; least per session, which reads one and writes another in a forward
_SLOTS_PER_SESSION = 2
# slots; per session with a snapshot: the prefix cache's at the end of its prompt, or a draft model's before the last
# proposal
_SLOTS_WITH_SNAPSHOT = 3
# share of the budget; most that slots take; the rest is for KV, which every position needs
_SLOTS_SHARE = 0.5


@dataclass(frozen=True)
class MemoryPlan:
    num_blocks: int
    num_slots: int  # 0: the model has no recurrent layers


def gpu_cache_bytes(utilization: float, total: int, free: int, drafting: int = 0) -> int:
    """Returns the bytes that a share of a GPU's memory leaves for a cache, once the target's weights are there.

    total, free: bytes of the GPU. drafting: bytes that will be taken later. Raises ConfigError if nothing is left.
    """
    taken = total - free + drafting + _WORKSPACE_BYTES
    left = int(utilization * total) - taken
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g}: nothing is left for the KV cache: weights, drafting and "
            f"workspace take {taken >> 20} of {total >> 20} MiB; give a larger share, or {FLAG}",
            param="gpu_memory_utilization",
        )
    return left


def plan_memory(
    budget_bytes: int, bytes_per_block: int, bytes_per_slot: int, max_num_seqs: int, flag: str = FLAG
) -> MemoryPlan:
    """Divides a budget: slots take what max_num_seqs sessions need, at most half of it; blocks take the rest.

    bytes_per_slot: 0 for a model without recurrent layers. flag: the budget's option, for errors. Raises ConfigError if
    not a single session can run.
    """
    if bytes_per_slot == 0:
        return MemoryPlan(max(1, budget_bytes // bytes_per_block), 0)
    affordable = int(budget_bytes * _SLOTS_SHARE) // bytes_per_slot
    num_slots = min(_SLOTS_WITH_SNAPSHOT * max_num_seqs, max(_SLOTS_PER_SESSION, affordable))
    num_blocks = (budget_bytes - num_slots * bytes_per_slot) // bytes_per_block
    if num_blocks < 1:
        least_mb = -(-(_SLOTS_PER_SESSION * bytes_per_slot + bytes_per_block) // 2**20)
        cause = f"one session needs {_SLOTS_PER_SESSION} recurrent states and a KV block, {least_mb} MiB"
        param = flag.removeprefix("--").replace("-", "_")
        raise ConfigError(f"{flag} {budget_bytes // 2**20}: {cause}; give it more", param=param)
    return MemoryPlan(num_blocks, num_slots)


def describe_slots(plan: MemoryPlan, bytes_per_slot: int, max_num_seqs: int, flag: str = FLAG) -> str:
    """Describes the slots in one sentence for the log."""
    held = f"{plan.num_slots} recurrent states of {bytes_per_slot / 2**20:.1f} MiB, two for each session in a forward"
    if plan.num_slots >= _SLOTS_PER_SESSION * max_num_seqs:
        return held
    enough_mb = -int(-_SLOTS_PER_SESSION * max_num_seqs * bytes_per_slot / _SLOTS_SHARE // 2**20)
    return (
        f"{held}: too few for --max-num-seqs {max_num_seqs}, so that sessions are preempted and computed again; "
        f"{flag} {enough_mb} is enough"
    )
