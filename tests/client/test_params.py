"""SamplingParams as the message of the gRPC API: what it has no field for is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.client import SamplingParams, Speculation, StructuredOutputsParams
from outrider.client.api.params import generate_message
from outrider.shared.errors import InvalidRequest
from outrider.v1 import common_pb2, gateway_pb2


def message_of(**given: Any) -> gateway_pb2.GenerateRequest:
    return generate_message("id", "hello", SamplingParams(**given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("prompt_logprobs", 0),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("truncate_prompt_tokens", -1),
        ("bad_words", ["word"]),
        ("bad_words", "word"),
        ("max_tokens", None),
    ],
)
def test_what_the_grpc_api_does_not_have_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} .*gRPC API") as refused:
        message_of(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"speculation": {"methods": "off"}}, "speculation.methods"),
        ({"speculation": Speculation(mode="fast")}, "speculation.mode"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, "structured_outputs"),
        ({"extra_args": {"lora": 1}}, None),
    ],
)
def test_other_refusals(given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        message_of(**given)
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"])
def test_an_empty_value_is_none(name: str) -> None:
    """The client's defaults were once empty tuples and an empty dict."""
    assert message_of(**{name: {} if name == "logit_bias" else ()}) == message_of(**{name: None}) == message_of()


def test_the_defaults_in_the_message() -> None:
    sampling = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=16, repetition_penalty=1.0)
    expected = gateway_pb2.GenerateRequest(request_id="id", prompt="hello", sampling_params=sampling)
    expected.speculation.SetInParent()
    assert message_of() == expected


def test_fields_that_are_given() -> None:
    fields: dict[str, Any] = {"cache_salt": "s", "prediction": "p", "logprobs": 2}
    message = message_of(stop="x", bad_words=[[1, 2], (3,)], logit_bias={5: 1.5}, top_k=-1, **fields)
    assert list(message.stop) == ["x"]
    sampling = message.sampling_params
    assert [list(word.token_ids) for word in sampling.bad_words] == [[1, 2], [3]]
    assert dict(sampling.logit_bias) == {5: 1.5}
    assert (sampling.top_k, sampling.num_logprobs, message.cache_salt) == (0, 2, "s")
    assert message.prediction == "p"


def test_mappings_and_classes_say_the_same() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 3, "mode": "exact", "token_tree": False}
    by_class = message_of(speculation=Speculation(**asked))  # type: ignore[arg-type]
    assert by_class.speculation == common_pb2.Speculation(
        method="ngram", num_speculative_tokens=3, mode=common_pb2.SPECULATION_MODE_EXACT, token_tree=False
    )
    assert by_class == message_of(speculation=asked) == message_of(extra_args={"speculation": asked})
    by_class = message_of(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert by_class.sampling_params.grammar.kind == common_pb2.Grammar.KIND_CHOICE
    assert by_class == message_of(structured_outputs={"choice": ["a", "b"], "json_object": False})
