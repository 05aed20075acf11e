"""The request to `outrider train auto`, and its memory between two calls. Nothing here needs torch.

Not here: the command's options (commands/auto.py), the steps (pipeline.py).
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.client.stack.installation import check_server_installed
from outrider.shared.checkpoint.draft_heads import require_model
from outrider.shared.checkpoint.hub import local_checkpoint, local_data_file
from outrider.training.data.prompts import Prompt, read_prompts
from outrider.training.errors import CheckpointError, PromptError, SettingError

METHOD = "eagle3"
# tokens; drafted in a round while tokens a round are counted; EAGLE-3's own default, and the depth of its training
DRAFT_LEN = 5
# questions; the fewest that are worth training on, a quarter of them held out
LEAST_QUESTIONS = 16
_STATE_FILE = "auto.json"
_PACKAGES = ("accelerate", "matplotlib")
# A remembered run keeps these; another value would be another run.
_FIXED = ("model", "prompts", "hours", "max_tokens", "seed")


@dataclass(frozen=True)
class AutoConfig:
    """until: tokens a round at which training ends; None: when the time is over. hours: for everything."""

    model: str
    output: Path
    prompts: str = ""
    until: float | None = None
    hours: float = 2.0
    max_tokens: int = 192
    seed: int = 0

    def check(self) -> None:
        """Raises SettingError, PromptError or ConfigError that names the option, CheckpointError: another run's."""
        if not (math.isfinite(self.hours) and self.hours > 0):
            raise SettingError(f"--hours must be above 0, not {self.hours:g}")
        if self.until is not None and not 1 < self.until <= DRAFT_LEN + 1:
            raise SettingError(
                f"--until must be above 1 and at most {DRAFT_LEN + 1}, not {self.until:g}: tokens a round, "
                f"of {DRAFT_LEN} drafted and the target's own"
            )
        if self.max_tokens < 8:
            raise SettingError(f"--max-tokens must be at least 8, not {self.max_tokens}")
        require_model(Path(local_checkpoint(self.model, "MODEL")), "MODEL")
        self.given_prompts()
        AutoState.of(self)
        check_server_installed()
        for package in _PACKAGES:  # the last of them is needed hours later
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)

    def given_prompts(self) -> list[Prompt] | None:
        """Returns the prompts of --prompts, in a random order; None: the model writes them.

        Raises PromptError, ConfigError.
        """
        if not self.prompts:
            return None
        given = read_prompts(local_data_file(self.prompts, "--prompts"))
        if any(prompt.token_ids is not None for prompt in given) or len({prompt.is_chat for prompt in given}) > 1:
            raise PromptError(f"--prompts {self.prompts}: must be all texts or all chats, and no token ids")
        if len(given) < LEAST_QUESTIONS:
            raise PromptError(f"--prompts {self.prompts}: has {len(given)} prompts, fewer than {LEAST_QUESTIONS}")
        random.Random(self.seed).shuffle(given)
        return given


@dataclass
class AutoState:
    """The run as OUTPUT/auto.json remembers it.

    spent_s: by all calls. start_s: of a stack. rates: what the probes measured (plan.py). steps: of the training; 0:
    the answers are not all written. is_trained: the head is in OUTPUT/model. verdict: the last measurement, or {}.
    """

    settings: dict[str, Any]
    spent_s: float = 0.0
    start_s: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    num_held_out: int = 0
    steps: int = 0
    is_trained: bool = False
    tokens_per_round: float = 0.0
    verdict: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: AutoConfig) -> AutoState:
        """Returns an earlier call's state, or a new one. Raises CheckpointError that names the option that differs."""
        settings = {name: getattr(config, name) for name in _FIXED}
        path = config.output / _STATE_FILE
        if not path.exists():
            if config.output.is_dir() and any(config.output.iterdir()):
                raise CheckpointError(f"--output {config.output} has other files; give a new folder")
            return cls(settings)
        try:
            state = cls(**json.loads(path.read_text(encoding="utf-8")))
            before = {name: state.settings[name] for name in _FIXED}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path} is not what `outrider train auto` writes: {error!r}") from None
        for name, value in settings.items():
            if before[name] != value:
                option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise CheckpointError(
                    f"--output {config.output} was made with {option} {before[name]}, not {value}; "
                    "use the same value, or another --output"
                )
        return state

    def save(self, output: Path) -> None:
        """Replaces the file atomically."""
        output.mkdir(parents=True, exist_ok=True)
        unfinished = output / f"{_STATE_FILE}.new"
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(output / _STATE_FILE)
