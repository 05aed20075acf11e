"""The one loader of settings: precedence, parsing, limits, and messages that name the variable and the choices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.drafter_service.config import DrafterConfig
from outrider.shared.config import load_config, setting
from outrider.shared.errors import ConfigError
from outrider.verifier_service.config import VerifierConfig


@dataclass(frozen=True)
class Config:
    model: str = setting("", "Folder of the model.")
    num_rows: int = setting(8, "Rows, at most 100 % of them.", minimum=1, maximum=64)
    share: float = setting(0.5, "Share.", minimum=0.0, maximum=1.0)
    dtype: str = setting("auto", "Type.", choices=("auto", "bfloat16"))
    caching: bool = setting(True, "Caching.")
    methods: tuple[str, ...] = setting(("ngram",), "Methods.")
    reflection: bool | None = setting(None, "Reflection.")
    port: int | None = setting(None, "Port.", minimum=1)


def load(argv: list[str] | None = None, environ: dict[str, str] | None = None) -> Config:
    return load_config(Config, argv or [], environ or {}, prog="test", description="d")


def test_defaults() -> None:
    assert load() == Config()


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    environ = {"OUTRIDER_NUM_ROWS": "3", "OUTRIDER_DTYPE": "bfloat16", "NUM_ROWS": "9"}
    config = load(["--num-rows", "4"], environ)
    assert (config.num_rows, config.dtype, config.share) == (4, "bfloat16", 0.5)


def test_every_kind_is_parsed() -> None:
    config = load(["--model=a b", "--share", "0.25", "--caching", "off", "--methods", " ngram, draft_model ,"])
    assert config == Config(model="a b", share=0.25, caching=False, methods=("ngram", "draft_model"))


def test_switches_have_a_flag_for_off() -> None:
    config = load(["--no-caching", "--no-reflection"], {"OUTRIDER_REFLECTION": "true"})
    assert (config.caching, config.reflection) == (False, False)
    with pytest.raises(SystemExit):
        load(["--no-model"])


@pytest.mark.parametrize(("text", "value"), [("auto", None), ("Auto", None), ("on", True), ("false", False)])
def test_a_switch_may_be_left_to_the_service(text: str, value: bool | None) -> None:
    assert load().reflection is None
    assert load(["--reflection", text]).reflection is value
    assert load(environ={"OUTRIDER_REFLECTION": text}).reflection is value


@pytest.mark.parametrize(("text", "value"), [("auto", None), ("AUTO", None), ("9000", 9000)])
def test_a_number_may_be_left_to_the_service(text: str, value: int | None) -> None:
    assert load().port is None
    assert load(["--port", text]).port == value
    with pytest.raises(ConfigError, match="--port: 0 is below the minimum, 1"):
        load(["--port", "0"])
    with pytest.raises(ConfigError, match="--port: 'next' is not auto or a whole number"):
        load(["--port", "next"])


@pytest.mark.parametrize("text", ["1", "true", "YES", "On"])
def test_true_words(text: str) -> None:
    assert load(environ={"OUTRIDER_CACHING": text}).caching is True


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--dtype", "int4"], {}, ["--dtype", "int4", "auto", "bfloat16"]),
        ([], {"OUTRIDER_DTYPE": "int4"}, ["OUTRIDER_DTYPE", "int4", "auto", "bfloat16"]),
        ([], {"OUTRIDER_NUM_ROWS": "many"}, ["OUTRIDER_NUM_ROWS", "many", "whole number"]),
        (["--num-rows", "1.5"], {}, ["--num-rows", "1.5", "whole number"]),
        (["--num-rows", "0"], {}, ["--num-rows", "0", "minimum", "1"]),
        (["--num-rows", "65"], {}, ["--num-rows", "65", "maximum", "64"]),
        (["--share", "1.01"], {}, ["--share", "1.01", "maximum"]),
        (["--share", "half"], {}, ["--share", "half", "a number"]),
        (["--caching", "maybe"], {}, ["--caching", "maybe", "true or false"]),
        (["--reflection", "maybe"], {}, ["--reflection", "maybe", "auto, true or false"]),
    ],
)
def test_a_wrong_value_names_its_source_and_what_would_do(
    argv: list[str], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_do_not_slip_past_the_limits(text: str) -> None:
    with pytest.raises(ConfigError):
        load([f"--share={text}"])


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--nmu-rows", "3"])
    assert caught.value.code == 2
    assert "--nmu-rows" in capsys.readouterr().err


@pytest.mark.parametrize("config_type", [Config, DrafterConfig, VerifierConfig])
def test_help_documents_every_setting(config_type: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(config_type, ["--help"], {}, prog="test", description="d")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in config_type.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} VALUE" in shown
        assert f"$OUTRIDER_{name.upper()}" in shown
    assert "100 % of them" in shown or config_type is not Config
