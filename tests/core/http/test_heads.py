"""Heads: how they are read, forwarded and refused, and how responses are written."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.heads import (
    Head,
    HeadRules,
    HttpError,
    Priority,
    TraceParent,
    error_body,
    error_response,
    parse_authority,
    read_head,
    response,
    split_target,
    status_line,
    trace_parent_of,
    with_query,
)

HOST = (b"host", b"localhost")


def read(
    *headers: tuple[bytes, bytes], method: bytes = b"GET", target: bytes = b"/a", version: str = "1.1"
) -> Head:
    head = read_head(method, target, version, list(headers or [HOST]))
    assert isinstance(head, Head), head
    return head


def refuse(
    *headers: tuple[bytes, bytes], method: bytes = b"GET", target: bytes = b"/a", version: str = "1.1"
) -> HttpError:
    error = read_head(method, target, version, list(headers))
    assert isinstance(error, HttpError), error
    assert error.close
    return error


def test_head_is_split_into_llamasups_and_forwarded_headers() -> None:
    head = read(
        HOST,
        (b"accept", b"*/*"),
        (b"authorization", b"Bearer one"),
        (b"x-api-key", b"two"),
        (b"content-length", b"12"),
        (b"x-forwarded-for", b"1.2.3.4"),
        (b"x-request-id", b"r-1"),
        (b"origin", b"http://a "),
        (b"upgrade", b"h2c"),
        (b"expect", b"100-Continue"),
        method=b"POST",
        target=b"/v1/chat/completions?a=b",
    )
    assert head.opening == b"POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost\r\naccept: */*\r\n"
    assert head.credentials == (b"one", b"two")
    assert (head.method, head.path, head.query) == (b"POST", b"/v1/chat/completions", b"a=b")
    assert (head.authority, head.origin, head.request_id) == (b"localhost", b"http://a", b"r-1")
    assert (head.upgrades, head.expects_continue, head.chunked) == (True, True, False)
    assert head.route.infers


def test_chunks_are_seen() -> None:
    assert read(HOST, (b"transfer-encoding", b" Chunked\t")).chunked


def test_http_1_0_needs_no_host_and_expects_nothing() -> None:
    head = read((b"expect", b"100-continue"), version="1.0")
    assert head.authority == b""
    assert not head.expects_continue


def test_other_schemes_are_not_credentials() -> None:
    assert read(HOST, (b"authorization", b"Basic abc")).credentials == ()


def test_an_insane_request_id_is_forgotten() -> None:
    assert read(HOST, (b"x-request-id", b"a b")).request_id == b""


def test_headers_named_by_connection_are_not_forwarded() -> None:
    head = read(HOST, (b"connection", b"close, Range,"), (b"range", b"1"), (b"accept", b"2"))
    assert head.opening.endswith(b"\r\naccept: 2\r\n")
    assert b"range" not in head.opening


def test_connection_cannot_remove_host_from_a_transparent_head() -> None:
    rules = HeadRules(transparent=True)
    head = read_head(b"GET", b"/a", "1.1", [HOST, (b"connection", b"host, x"), (b"x", b"1")], rules)
    assert isinstance(head, Head)
    assert head.opening == b"GET /a HTTP/1.1\r\nhost: localhost\r\n"


def test_the_absolute_form_overrules_host() -> None:
    assert read(HOST, target=b"HTTP://other:1/a").authority == b"other:1"


def test_blanks_around_a_host_are_removed() -> None:
    assert read((b"host", b"localhost \t")).authority == b"localhost"


@pytest.mark.parametrize(
    ("headers", "changes", "status"),
    [
        ([HOST], {"version": "2.0"}, 505),
        ([HOST], {"version": "0.9"}, 505),
        ([HOST], {"method": b"TRACE"}, 405),
        ([HOST], {"target": b"a"}, 400),
        ([HOST], {"target": b"/a#b"}, 400),
        ([HOST], {"target": b"*"}, 400),
        ([HOST], {"target": b"ftp://a/b"}, 400),
        ([], {}, 400),
        ([HOST, HOST], {}, 400),
        ([(b"host", b"a b")], {"target": b"http://localhost/a"}, 400),
        ([HOST, HOST], {"version": "1.0"}, 400),
        ([HOST, (b"origin", b"a"), (b"origin", b"a")], {}, 400),
        ([HOST, (b"transfer-encoding", b"gzip, chunked")], {}, 400),
        ([HOST, (b"transfer-encoding", b"chunked")], {"version": "1.0"}, 400),
        ([HOST, (b"expect", b"200-ok")], {}, 417),
    ],
)
def test_unsafe_heads_are_refused(
    headers: list[tuple[bytes, bytes]], changes: dict[str, bytes | str], status: int
) -> None:
    assert refuse(*headers, **changes).status == status  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "method", "split"),
    [
        (b"/", b"GET", (b"", b"/", b"")),
        (b"/a?b?c", b"GET", (b"", b"/a", b"b?c")),
        (b"//a/b", b"GET", (b"", b"//a/b", b"")),
        (b"*", b"OPTIONS", (b"", b"*", b"")),
        (b"http://h:1", b"GET", (b"h:1", b"/", b"")),
        (b"https://h/a?b", b"GET", (b"h", b"/a", b"b")),
        (b"http://h?b", b"GET", (b"h", b"/", b"b")),
        (b"http:///a", b"GET", None),
        (b"", b"GET", None),
    ],
)
def test_targets_are_split_and_not_decoded(
    target: bytes, method: bytes, split: tuple[bytes, bytes, bytes] | None
) -> None:
    assert split_target(target, method) == split


def test_another_query_changes_nothing_else_of_a_head() -> None:
    own = (HOST, (b"x-own", b"model=v"))
    before = read(*own, target=b"/props?model=v")
    after = with_query(before, b"model=m&x")
    assert after.query == b"model=m&x"
    assert after.opening == read(*own, target=b"/props?model=m&x").opening
    assert (before.query, after.path, after.route) == (b"model=v", before.path, before.route)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (b"localhost", ("localhost", None)),
        (b"LocalHost.:80", ("localhost", 80)),
        (b"127.0.0.1:65535", ("127.0.0.1", 65535)),
        (b"[::1]", ("::1", None)),
        (b"[FE80::1]:8080", ("fe80::1", 8080)),
        (b"my_box", ("my_box", None)),
        (b"", None),
        (b"a:65536", None),
        (b"a:", None),
        (b":80", None),
        (b"a b", None),
        (b"a,b", None),
        (b"u@a", None),
        (b"a/b", None),
        (b"::1", None),
        (b"[::1", None),
        (b"-a", None),
        (b"a\xff", None),
    ],
)
def test_authorities_are_parsed_or_malformed(value: bytes, parsed: tuple[str, int | None] | None) -> None:
    assert parse_authority(value) == parsed


@given(st.binary(max_size=40))
def test_no_bytes_surprise_the_authority_parser(value: bytes) -> None:
    parsed = parse_authority(value)
    assert parsed is None or (parsed[0].isascii() and not set(parsed[0]) & set(" /@,\\\r\n"))


def test_status_lines() -> None:
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(299) == b"HTTP/1.1 299 \r\n"


def test_a_response_has_its_framing() -> None:
    assert response(200, b"{}", b"X: y\r\n") == (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n"
        b"Content-Length: 2\r\nX: y\r\n\r\n{}"
    )
    assert response(200, b"{}", method=b"HEAD").endswith(b"Content-Length: 2\r\n\r\n")
    assert response(204, b"", close=True) == b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"


def test_an_error_object_is_llama_servers_with_cause_and_remedy_where_known() -> None:
    assert error_body(HttpError(503, "Loading model", "unavailable_error")) == (
        b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    )
    error = json.loads(error_body(HttpError(400, "no", cause="c", remedy="r")))["error"]
    assert (error["cause"], error["remedy"]) == ("c", "R.")
    assert not {"percent", "eta_s"} & set(error)
    error = json.loads(error_body(HttpError(503, "no", percent=43.2, eta_s=12.345)))["error"]
    assert (error["percent"], error["eta_s"]) == (43.2, 12.3)


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (2.5, b"3"), (30.0, b"30")])
def test_retry_after_is_in_whole_seconds_and_at_least_one(seconds: float, header: bytes) -> None:
    assert b"\r\nRetry-After: " + header + b"\r\n" in error_response(
        HttpError(503, "no", retry_after_s=seconds)
    )


@pytest.mark.parametrize(
    ("percent", "eta_s", "progress"),
    [(43.2, 12.3, "; 43 % loaded, about 12 s left"), (None, 12.3, ""), (43.2, None, ""), (None, None, "")],
)
def test_message_says_how_far_a_load_is(percent: float | None, eta_s: float | None, progress: str) -> None:
    why = HttpError(503, "Loading model", cause="loading", percent=percent, eta_s=eta_s)
    for body, message in [
        (error_body(why), f"Loading model{progress}"),
        (error_body(why, why.message), "Loading model"),
    ]:
        error = msgspec.json.decode(body)["error"]
        assert error["message"] == message
        assert (error.get("percent"), error.get("eta_s")) == (percent, eta_s)


@pytest.mark.parametrize(
    ("message", "shown"),
    [("Loading model", "Loading model"), ("it aborted: assert(secret)", "The server is not ready")],
)
def test_error_without_its_reason_quotes_no_log(message: str, shown: str) -> None:
    error = HttpError(503, message, cause="aborted", remedy="see the log", retry_after_s=2.0, percent=4.0)
    assert error.without_reason() == HttpError(503, shown, retry_after_s=2.0)


@pytest.mark.parametrize(("status", "type_"), [(503, "unavailable_error"), (404, "invalid_request_error")])
def test_type_of_an_error_follows_from_its_status(status: int, type_: str) -> None:
    assert HttpError(status, "no").type == type_
    assert HttpError(status, "no", "server_error").type == "server_error"


def test_error_about_a_path_outside_utf8_can_be_written() -> None:
    body = error_body(HttpError(503, "/m/\udcff.gguf: bad", remedy="Get another \udcff."))
    assert json.loads(body)["error"]["message"] == "/m/\\xff.gguf: bad"
    assert json.loads(body)["error"]["remedy"] == "Get another \\xff."


def test_error_can_close_and_401_names_the_scheme() -> None:
    assert b"Connection: close" in error_response(HttpError(400, "no", close=True))
    assert b"Connection: close" not in error_response(HttpError(404, "no"))
    assert b"WWW-Authenticate: Bearer\r\n" in error_response(HttpError(401, "no"))


# --- trace context -------------------------------------------------------------------------------

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


@pytest.mark.parametrize(
    "traceparent",
    [
        b"00-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-00" % (TRACE, SPAN),
        b"01-%b-%b-01" % (TRACE, SPAN),
        b"cc-%b-%b-01-what-is-to-come" % (TRACE, SPAN),
    ],
)
def test_trace_and_span_of_the_client_are_read(traceparent: bytes) -> None:
    parent = trace_parent_of(traceparent)
    assert (parent.trace_id, parent.span_id) == (TRACE.decode(), SPAN.decode())


@pytest.mark.parametrize(("flags", "sampled"), [(b"00", False), (b"01", True), (b"02", False), (b"ff", True)])
def test_the_last_bit_of_the_flags_says_whether_the_client_exports_its_span(
    flags: bytes, sampled: bool
) -> None:
    assert trace_parent_of(b"00-%b-%b-%b" % (TRACE, SPAN, flags)).is_sampled is sampled


@pytest.mark.parametrize(
    "traceparent",
    [
        b"",
        b"00",
        TRACE,
        b"ff-%b-%b-01" % (TRACE, SPAN),
        b"00-%b-%b-01-more" % (TRACE, SPAN),
        b"00-%b-%b-01-" % (TRACE, SPAN),
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"00-%b-%b-01" % (TRACE.upper(), SPAN),
        b"00-%b-%b-01\n" % (TRACE, SPAN),
        b"00-%b-%b-0g" % (TRACE, SPAN),
        b"00-%b-%b-01" % (TRACE[1:], SPAN),
    ],
)
def test_invalid_traceparent_has_no_trace(traceparent: bytes) -> None:
    assert trace_parent_of(traceparent) == TraceParent("", "", is_sampled=False)


# --- priorities ----------------------------------------------------------------------------------


def head(*headers: tuple[bytes, bytes], rules: HeadRules | None = None) -> Head | HttpError:
    return read_head(b"POST", b"/v1/chat/completions", "1.1", [HOST, *headers], rules or HeadRules())


@pytest.mark.parametrize(
    ("value", "priority"),
    [(b"high", Priority.HIGH), (b" Normal ", Priority.NORMAL), (b"LOW", Priority.LOW)],
)
def test_priority_header_is_read(value: bytes, priority: Priority) -> None:
    read = head((b"x-llamasup-priority", value))
    assert isinstance(read, Head)
    assert read.priority is priority
    assert b"llamasup" not in read.opening.lower()


def test_request_without_the_header_has_no_priority() -> None:
    read = head()
    assert isinstance(read, Head)
    assert read.priority is None


@pytest.mark.parametrize("value", [b"", b"urgent", b"0", b"high, low"])
def test_invalid_priority_is_refused_with_the_valid_ones(value: bytes) -> None:
    error = head((b"x-llamasup-priority", value))
    assert isinstance(error, HttpError)
    assert (error.status, error.cause) == (400, "bad_priority")
    assert "high, normal, low or batch" in error.remedy


FOREIGN = """cookie cookie2 api-key x-goog-api-key x-auth-token proxy-authorization x-amz-security-token dpop
    x-forwarded-for x-real-ip forwarded via referer from sec-fetch-site sec-fetch-dest x-conversation-id
    x-llamasup-anything x-llamasup-node x-llamasup-client x-llamasup-through-proxy openai-organization
    cf-access-jwt-assertion x-unknown"""


@pytest.mark.check("X4", "cookies, keys of other programs and unknown headers are dropped")
@pytest.mark.parametrize("name", FOREIGN.split())
def test_server_gets_only_known_headers_of_a_client(name: str) -> None:
    line = (name.encode(), b"secret")
    read = head(line, (b"accept", b"text/plain"))
    assert isinstance(read, Head)
    assert b"accept: text/plain\r\n" in read.opening
    assert b"secret" not in read.opening


def test_a_transparent_llamasup_leaves_them_as_they_are() -> None:
    """With a limit of its own it serves by them, but refuses nothing that llama-server would take."""
    seen_through = HeadRules(transparent=True)
    for value, priority in ((b"low", Priority.LOW), (b"urgent", None)):
        read = head((b"x-llamasup-priority", value), (b"x-llamasup-anything", b"1"), rules=seen_through)
        assert isinstance(read, Head)
        assert read.priority is priority
        assert b"x-llamasup-priority: " + value in read.opening
        assert b"x-llamasup-anything: 1" in read.opening


@pytest.mark.parametrize(("values", "expected"), [([b"s"], b"s"), ([b" s\t"], b"s"), ([b""], b""), ([], b"")])
def test_secret_of_the_console_is_read_and_no_model_gets_it(values: list[bytes], expected: bytes) -> None:
    read = head(*((b"x-llamasup-console", value) for value in values))
    assert isinstance(read, Head)
    assert read.console_secret == expected
    assert b"console" not in read.opening
