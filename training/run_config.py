"""The settings of a training run and their checks. Nothing here needs torch, which takes seconds to import.

Not here: the command's options (commands/train.py), the run (train.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.shared.checkpoint.draft_heads import require_model
from outrider.training.errors import DataError, SettingError
from outrider.training.heads.options import HeadOptions

PRECISIONS = ("auto", "bf16", "fp32")
OPTIMIZERS = ("adamw", "muon")
EXPORT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class OptimizationConfig:
    """The length of the run and its learning rate. A step takes `accumulation` batches of `batch_size` windows."""

    steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1
    lr: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    precision: str = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raises SettingError that names the option."""
        for name in ("steps", "batch_size", "accumulation"):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise SettingError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        for name, choices in (("optimizer", OPTIMIZERS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise SettingError(f"--{name} {getattr(self, name)!r}: must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run. Only the fields of the first block affect the result."""

    method: str
    target: Path
    data: tuple[Path, ...]
    output: Path
    head: HeadOptions = field(default_factory=HeadOptions)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    seq_len: int = 512
    count_prompts: bool = False
    hidden_states: Path | None = None  # folder of recorded ones, which stand in for the target's forward
    fit_batch: bool = False  # smaller batches, more of them a step, if optimization.batch_size does not fit

    eval_data: tuple[Path, ...] = ()
    eval_batches: int = 8
    eval_every: int = 200
    checkpoint_every: int = 100
    log_every: int = 10
    export_dtype: str = "bfloat16"
    target_name: str = ""
    device: str = "cpu"
    threads: int = 0
    resume: bool = False

    def check(self) -> None:
        """Raises SettingError or ConfigError that names the option, or DataError: a file is missing."""
        self.head.check(self.method)
        self.optimization.check()
        for name in ("eval_batches", "eval_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        check_export_dtype(self.export_dtype)
        for path in (*self.data, *self.eval_data):
            if not path.is_file():
                raise DataError(f"{path} does not exist")
        require_model(self.target, "--target")


def check_export_dtype(name: str) -> None:
    """Raises SettingError that lists the choices."""
    if name not in EXPORT_DTYPES:
        raise SettingError(f"--dtype {name!r}: must be one of {', '.join(EXPORT_DTYPES)}")
