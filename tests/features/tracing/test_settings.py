"""The variables of OpenTelemetry that turn tracing on."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.errors import ConfigInvalid
from llamasup.features.tracing.settings import (
    Sampler,
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


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SERVICE_NAME": "x", ENDPOINT: ""},
        {**ON, "OTEL_SDK_DISABLED": "True"},
        {**ON, "OTEL_TRACES_EXPORTER": "none"},
        {**ON, "OTEL_TRACES_EXPORTER": "zipkin"},
    ],
)
def test_tracing_is_off(variables: dict[str, str]) -> None:
    assert read_settings(variables) is None


URL = "http://127.0.0.1:4318/v1/traces"
NAMED = ("service.name", "llamasup")
TRACES = "OTEL_EXPORTER_OTLP_TRACES_"


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, TracingSettings(URL, (), 10.0, resource=(NAMED,))),
        # Only the general endpoint gets the path of traces.
        ({ENDPOINT: "https://c.example/base/"}, TracingSettings("https://c.example/base/v1/traces")),
        ({f"{TRACES}ENDPOINT": "http://[::1]:9/t"}, TracingSettings("http://[::1]:9/t")),
        ({f"{TRACES}ENDPOINT": "http://c.example"}, TracingSettings("http://c.example/")),
        ({f"{TRACES}ENDPOINT": "http://c.example/?key=k#x"}, TracingSettings("http://c.example/?key=k")),
        (
            {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%2Cb, x = y%3D ,"},
            TracingSettings(URL, (("api-key", "a,b"), ("x", "y="))),
        ),
        (
            {"OTEL_EXPORTER_OTLP_HEADERS": "a=1", f"{TRACES}HEADERS": "b=2"},
            TracingSettings(URL, (("b", "2"),)),
        ),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
                "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
                "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
            },
            TracingSettings(URL, (), 2.5, "/ca.pem", gzip=True),
        ),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "team=a%20b,service.name=other"},
            TracingSettings(URL, resource=(("service.name", "other"), ("team", "a b"))),
        ),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=other", "OTEL_SERVICE_NAME": "mine"},
            TracingSettings(URL, resource=(("service.name", "mine"),)),
        ),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, TracingSettings(URL, sampler=Sampler(1.0, False))),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            TracingSettings(URL, sampler=Sampler(0.0, True)),
        ),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            TracingSettings(URL, sampler=Sampler(0.25, True)),
        ),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, TracingSettings(URL, sampler=Sampler(1.0, False))),
    ],
)
def test_variables_are_read(variables: dict[str, str], settings: TracingSettings) -> None:
    assert read(**variables) == settings


def test_the_query_of_the_url_is_not_shown() -> None:
    settings = read(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://c.example/t?key=secret")
    assert settings.shown_url == "http://c.example/t"
    assert "secret" not in repr(settings)


URLS = (
    "127.0.0.1:4318",
    "grpc://c.example",
    "http://",
    "http://[::1",
    "http://c:0",
    "http://c:x",
    "http://c d",
)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((ENDPOINT, url, f"${ENDPOINT} is not the URL of a collector.") for url in (*URLS, "http://ü")),
        # Neither a password nor a header is shown.
        (ENDPOINT, "http://user:secret@c.example", f"${ENDPOINT} contains a password."),
        *(
            ("OTEL_EXPORTER_OTLP_HEADERS", value, "$OTEL_EXPORTER_OTLP_HEADERS is invalid.")
            for value in ("authorization", "=x", "a b=c", "a=b%0d%0ax: y", "a=ü")
        ),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "$OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but llamasup sends"),
        (f"{TRACES}PROTOCOL", "http/json", f"${TRACES}PROTOCOL is 'http/json'"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5", "$OTEL_EXPORTER_OTLP_TIMEOUT is '1.5'."),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "$OTEL_EXPORTER_OTLP_TIMEOUT is '0'."),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "$OTEL_EXPORTER_OTLP_COMPRESSION is 'zstd'."),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "$OTEL_TRACES_SAMPLER is 'jaeger_remote'."),
        ("OTEL_RESOURCE_ATTRIBUTES", "team", "$OTEL_RESOURCE_ATTRIBUTES is invalid."),
        *(
            ("OTEL_TRACES_SAMPLER_ARG", share, f"$OTEL_TRACES_SAMPLER_ARG is {share!r}.")
            for share in ("2", "-0.1", "nan", "half")
        ),
    ],
)
def test_invalid_value_is_a_problem_that_names_the_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigInvalid) as found:
        read_settings({**ON, "OTEL_TRACES_SAMPLER": "traceidratio", name: value})
    assert found.value.message.startswith(message)
    assert found.value.remedy.endswith(".")


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
    with contextlib.suppress(ConfigInvalid):
        assert isinstance(read_settings(variables), TracingSettings)
