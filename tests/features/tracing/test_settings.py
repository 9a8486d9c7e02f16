"""The variables of OpenTelemetry that turn tracing on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.features.tracing.settings import (
    Sampler,
    TracingProblem,
    TracingSettings,
    is_sampled,
    read_settings,
)
from tests.features.tracing.records import TRACE

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ON = {ENDPOINT: "http://127.0.0.1:4318"}


def read(**variables: str) -> TracingSettings:
    settings = read_settings({**ON, **variables})
    assert isinstance(settings, TracingSettings), settings
    return settings


def problem(**variables: str) -> str:
    found = read_settings({**ON, **variables})
    assert isinstance(found, TracingProblem), found
    assert found.remedy.endswith(".")
    return found.message


def test_tracing_is_off_without_an_endpoint() -> None:
    assert read_settings({"OTEL_SERVICE_NAME": "x", ENDPOINT: ""}) is None


@pytest.mark.parametrize(
    "variables",
    [{"OTEL_SDK_DISABLED": "True"}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "zipkin"}],
)
def test_tracing_can_be_turned_off(variables: dict[str, str]) -> None:
    assert read_settings({**ON, **variables}) is None


def test_defaults_are_those_of_the_specification() -> None:
    settings = read(OTEL_TRACES_EXPORTER="console, otlp")
    assert settings == TracingSettings("http://127.0.0.1:4318/v1/traces")
    assert (settings.timeout_s, settings.sampler) == (10.0, Sampler(1.0, follows_parent=True))
    assert settings.resource == (("service.name", "llamasup"),)


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({ENDPOINT: "https://c.example/base/"}, "https://c.example/base/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://[::1]:9/t"}, "http://[::1]:9/t"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c.example"}, "http://c.example/"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c.example/?key=k#x"}, "http://c.example/?key=k"),
    ],
)
def test_only_the_general_endpoint_gets_the_path_of_traces(variables: dict[str, str], url: str) -> None:
    assert read(**variables).url == url


def test_the_query_of_the_url_is_not_shown() -> None:
    settings = read(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://c.example/t?key=secret")
    assert settings.shown_url == "http://c.example/t"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:4318",
        "grpc://c.example",
        "http://",
        "http://[::1",
        "http://c:0",
        "http://c:x",
        "http://c d",
        "http://ü",
    ],
)
def test_invalid_endpoint_is_a_problem(url: str) -> None:
    assert problem(**{ENDPOINT: url}) == "$OTEL_EXPORTER_OTLP_ENDPOINT is not the URL of a collector."


def test_problem_with_a_password_does_not_show_it() -> None:
    assert (
        problem(**{ENDPOINT: "http://user:secret@c.example"})
        == "$OTEL_EXPORTER_OTLP_ENDPOINT contains a password."
    )
    assert problem(OTEL_EXPORTER_OTLP_HEADERS="authorization") == "$OTEL_EXPORTER_OTLP_HEADERS is invalid."


def test_headers_are_decoded() -> None:
    settings = read(OTEL_EXPORTER_OTLP_HEADERS="api-key=a%2Cb, x = y%3D ,")
    assert settings.headers == (("api-key", "a,b"), ("x", "y="))
    both = read(OTEL_EXPORTER_OTLP_HEADERS="a=1", OTEL_EXPORTER_OTLP_TRACES_HEADERS="b=2")
    assert both.headers == (("b", "2"),)


@pytest.mark.parametrize("value", ["=x", "a b=c", "a=b%0d%0ax: y", "a=ü"])
def test_invalid_headers_are_a_problem(value: str) -> None:
    assert problem(OTEL_EXPORTER_OTLP_HEADERS=value) == "$OTEL_EXPORTER_OTLP_HEADERS is invalid."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team"),
    ],
)
def test_unsupported_value_is_a_problem_that_names_the_variable(name: str, value: str) -> None:
    assert f"${name} is " in problem(**{name: value})


def test_further_variables_are_read() -> None:
    settings = read(
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_EXPORTER_OTLP_TIMEOUT="2500",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_EXPORTER_OTLP_CERTIFICATE="/ca.pem",
        OTEL_RESOURCE_ATTRIBUTES="team=a%20b,service.name=other",
    )
    assert (settings.timeout_s, settings.gzip, settings.certificate) == (2.5, True, "/ca.pem")
    assert dict(settings.resource) == {"team": "a b", "service.name": "other"}
    named = read(OTEL_RESOURCE_ATTRIBUTES="service.name=other", OTEL_SERVICE_NAME="mine")
    assert dict(named.resource) == {"service.name": "mine"}


@pytest.mark.parametrize(
    ("name", "argument", "sampler"),
    [
        ("always_on", "", Sampler(1.0, follows_parent=False)),
        ("parentbased_always_off", "0.5", Sampler(0.0)),
        ("parentbased_traceidratio", "0.25", Sampler(0.25)),
        ("traceidratio", "", Sampler(1.0, follows_parent=False)),
    ],
)
def test_samplers_are_read(name: str, argument: str, sampler: Sampler) -> None:
    assert read(OTEL_TRACES_SAMPLER=name, OTEL_TRACES_SAMPLER_ARG=argument).sampler == sampler


@pytest.mark.parametrize("share", ["2", "-0.1", "nan", "half"])
def test_invalid_share_is_a_problem(share: str) -> None:
    message = problem(OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG=share)
    assert message == f"$OTEL_TRACES_SAMPLER_ARG is {share!r}."


@pytest.mark.parametrize("client", [True, False])
def test_client_decides_for_its_own_trace(client: bool) -> None:
    for share in (0.0, 1.0):
        assert is_sampled(Sampler(share), TRACE, client, dice=0) is client
        assert is_sampled(Sampler(share, follows_parent=False), TRACE, client, dice=0) is (share == 1.0)


@given(st.integers(0, 2**64 - 1))
def test_all_or_none_of_the_own_traces_are_sampled_at_the_ends(dice: int) -> None:
    assert is_sampled(Sampler(1.0), "", False, dice)
    assert not is_sampled(Sampler(0.0), "", True, dice)


def test_share_is_of_the_lower_half_of_the_trace_id() -> None:
    half = Sampler(0.5, follows_parent=False)
    assert is_sampled(half, "f" * 16 + "7" + "f" * 15, False, dice=0)
    assert not is_sampled(half, "0" * 16 + "8" + "0" * 15, False, dice=0)


@given(st.text(), st.text(), st.text())
def test_every_environment_gives_settings_or_a_problem(endpoint: str, headers: str, resource: str) -> None:
    variables = {
        ENDPOINT: f"http://{endpoint}",
        "OTEL_EXPORTER_OTLP_HEADERS": headers,
        "OTEL_RESOURCE_ATTRIBUTES": resource,
    }
    assert isinstance(read_settings(variables), TracingSettings | TracingProblem)
