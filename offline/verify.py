"""`outrider verify FILE --model PATH` (or `python -m outrider.offline.verify`): are these the tokens of these weights?

FILE is an answer with a receipt ("receipt": true in its request), as JSON or as the events of its stream.

Not here: how it is checked (gateway/answers/check.py), and receipts of rejection mode, which has no public noise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.console import Console

from outrider.gateway.answers.check import Form, Verification, check_receipt, other_part, redrawn
from outrider.gateway.answers.read import read_answer
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.openai.receipt_signature import load_public_key, signature_fault
from outrider.offline.llm import LLM
from outrider.shared.command_line import run_command
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.messages import WEIGHTS_MARK, weights_of


class ReceiptVerifier(LLM):
    """A loaded target that draws the tokens of answers again."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        super().__init__(model, speculative_config={"method": "ngram"}, **arguments)
        from outrider.engine.numerics import measure_numerics  # loads torch

        size = arguments.get("tensor_parallel_size", 1)
        self.numerics = measure_numerics(self._engines.loaded, tensor_parallel_size=size, graphs=True)

    def verify(self, answer: Mapping[str, Any], public_key: Ed25519PublicKey | None = None) -> Verification:
        """public_key: that the receipt must be signed with. Raises InvalidRequest for a receipt that cannot be read, or
        that asks for what the model does not have.
        """
        receipt = Receipt.parse(answer.get("receipt"))
        fault = signature_fault(answer["receipt"], public_key) if public_key is not None else ""
        if fault:
            return Verification(0, wrong=fault)
        check_receipt(receipt, self._served)
        here, there = self.numerics, receipt.record.numerics
        if weights_of(there):
            from outrider.engine.model.weights_digest import weights_digest  # loads torch

            here += WEIGHTS_MARK + weights_digest(Path(self._engines.loaded.path))
        if there is not None and here != there:
            return Verification(0, other_kind=f"the receipt is of a verifier of kind {there}, this one is {here}")

        async def compare(made: Callable[[], Any]) -> str:
            return other_part(made(), answer)

        generation = self._generation
        return self._loop.run(redrawn(receipt, Form.of(answer), compare, generation.generate, generation.tokenizer))


def main(
    file: Annotated[Path, typer.Argument(help="An answer with a receipt: its JSON, or the events of its stream.")],
    model: Annotated[str, typer.Option(help="Folder of the target's HF checkpoint, or a .gguf file.")],
    public_key: Annotated[
        Path | None, typer.Option(help="PEM of the server's public key: the receipt must be signed with it.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: every core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Draw every token of an answer again, from its receipt and the weights.

    Exit codes: 0 all tokens confirmed, 1 not confirmed, 2 wrong usage, 3 cannot say (another kind of arithmetic).

    Example: outrider verify answer.json --model models/demo-target
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        answer = _read(file)
        key = load_public_key(public_key, "public-key") if public_key is not None else None
        receipt = Receipt.parse(answer.get("receipt"))
        with ReceiptVerifier(model, num_threads=threads, **_arguments(receipt.record.numerics)) as verifier:
            found = verifier.verify(answer, key)
    except OutriderError as error:
        errors.print(f"outrider: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        console.print_json(
            json.dumps({"confirmed": found.exit_code == 0, "num_tokens": found.num_tokens, "said": found.conclusion})
        )
    else:
        console.print(found.conclusion, markup=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)


def _arguments(numerics: str | None) -> dict[str, Any]:
    """Loads the model as the verifier of the receipt did (engine/numerics.py has the form)."""
    found = re.match(r"(\w+)[^/]*?(?:\+kv-(\w+))?/(\w+)/\w+/tp(\d{1,3})/", numerics or "")
    if found is None:
        return {}
    dtype, kv_cache, device, size = found.groups()
    kv_cache = kv_cache or "auto"
    return {"dtype": dtype, "kv_cache_dtype": kv_cache, "device": device, "tensor_parallel_size": int(size)}


def _read(file: Path) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    try:
        return read_answer(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}", param="FILE") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file}: {error}", param="FILE") from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    run_command(app, "outrider verify")
