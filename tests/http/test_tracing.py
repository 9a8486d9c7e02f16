from __future__ import annotations

import pytest

from llamasup.http.heads import trace_id_of

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
def test_the_trace_s_id_is_read(traceparent: bytes) -> None:
    assert trace_id_of(traceparent) == TRACE.decode()


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
def test_what_is_no_traceparent_is_of_no_trace(traceparent: bytes) -> None:
    assert trace_id_of(traceparent) == ""
