"""A verifier's own lookups draft what a grammar forces: the same output as plain decoding, in fewer rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.engine.certificate import certify
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import LocalDrafts
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.verifier_service.engine_client import PROMPT, generate, make_spec, running_engine, save_llama, tokens_of
from tests.verifier_service.test_field_pairs import IDS, TEXTS

# 17 characters and the end are forced, and one character is the model's choice.
GRAMMAR = Grammar(GrammarKind.LARK, 'start: "{b:" /[012]/ ",c:1,a:0,bb:2}"')
METHODS = {
    "ngram": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": SuffixMethod(SuffixSettings(24, 0, 10_000, 4.0, 0.0)),
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_forced_text_takes_few_rounds(tmp_path: Path, name: str, temperature: float) -> None:
    folder = save_llama(tmp_path, seed=5)
    backend = tokenizers.Tokenizer(models.BPE(vocab=IDS, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TEXTS[:3])
    backend.save(str(folder / "tokenizer.json"))
    loaded = load_model(str(folder), dtype="float32")
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(64, 4)))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, grammar=GRAMMAR)
    with running_engine(loaded, certificate, local_methods={name: METHODS[name]}) as engine:
        plain = generate(engine, make_spec(PROMPT, params), free_run=1000)
        drafted = generate(engine, make_spec(PROMPT, params), free_run=1000, local=LocalDrafts(name, 4))
    assert tokens_of(drafted) == tokens_of(plain)
    assert len(plain) == len(tokens_of(plain)) == 19
    # The prompt's own round brings one token; the others are forced but for one, and a round has five at most.
    assert len(drafted) <= 6
