"""Formats of answers: what can be followed, and what would end the engine of LMDeploy before 0.18."""

import pytest
from lmdeploy import GenerationConfig, PytorchEngineConfig

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.layers import response_formats
from dlinfer.framework.lmdeploy_ext.refusals import sampling_checks

OBJECT = {"type": "object", "properties": {"age": {"type": "integer"}}}


@pytest.mark.parametrize(
    "style",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}},
        {"type": "json_schema", "json_schema": OBJECT},
        {"type": "json_schema", "json_schema": '{"type": "object"}'},
        {"type": "json_object"},
        {"type": "regex_schema", "regex_schema": "[a-z]+"},
    ],
)
def test_what_can_be_followed(style):
    assert response_formats.fault(style) is None


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        ({"type": "haiku"}, "no type 'haiku'"),
        ({}, "no type None"),
        ({"type": ["json_object"]}, "no type ['json_object']"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "potato"}}}, "potato"),
        ({"type": "json_schema", "json_schema": "{"}, "Expecting property name"),
        ({"type": "json_schema", "json_schema": [1]}, "a JSON schema is an object"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "regex_schema", "regex_schema": "a(b"}, "parenthesis"),
        ({"type": "structural_tag", "structural_tag": {"type": "x"}}, ""),
    ],
)
def test_what_cannot(style, reason):
    fault = response_formats.fault(style)
    assert fault is not None and reason in fault and "\n" not in fault


def test_lmdeploy_before_0_18_is_asked_for_it_before_the_request_costs_anything(monkeypatch):
    PytorchEngineConfig(device_type="cpu")
    config = GenerationConfig(response_format={"type": "haiku"})
    sampling_checks.check_generation(config)  # this release refuses that request alone, by itself
    monkeypatch.setattr(sampling_checks, "has_build_specs", lambda: False)
    with pytest.raises(GenerationOptionError, match=r"response_format.*no type 'haiku'"):
        sampling_checks.check_generation(config)
