"""What a body asks for, found while it comes. The oracle decodes it whole."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasup.core.http.body_scan import (
    MANY_JOBS,
    MAX_DEPTH,
    MAX_STEPS,
    WINDOW,
    BodyScan,
    refused_media,
    scanned,
)
from llamasup.core.http.requested_model import read_body
from tests.kit.bodies import LABELS, bodies, jobs_of

URL = "http://good.example/x"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def form_of(*names: str) -> str:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n["a", "b"]' for name in names]
    return "\r\n".join((*parts, "--b--\r\n"))


def in_pieces(body: bytes, *cuts: int, lists: tuple[str, ...] = ("prompt",)) -> BodyScan:
    scan = BodyScan((each.encode() for each in lists), urls=True)
    for begin, end in zip((0, *cuts), (*cuts, len(body)), strict=True):
        scan.feed(body[begin:end])
    return scan


def counted_as_the_oracle_counts(body: bytes, label: str, cuts: Sequence[int]) -> int:
    """Never less, wherever it is cut, and exactly where no key comes twice."""
    lists = LABELS[label]
    expected = jobs_of(body, lists)
    read = read_body(body, b"", label)[1]
    scan = in_pieces(body, *cuts, lists=lists)
    assert scan.jobs == in_pieces(body, *range(1, len(body)), lists=lists).jobs
    assert read >= expected
    assert scan.jobs >= expected
    if len(json.loads(body, object_pairs_hook=lambda pairs: pairs)) == len(json.loads(body)):
        assert read == scan.jobs == expected
    return expected


# --- jobs


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        ('{"prompt": "one"}', 1),
        ('{"prompt": ["one", "two"]}', 2),
        ('{"prompt": ["one", "two"], "n": 3}', 6),
        ('{"prompt": "one", "n_cmpl": 4}', 4),
        ('{"n": 2.5}', 3),
        ('{"n": 1e1 }', 10),
        ('{"n": "3"}', 1),
        ('{"n": [3]}', 1),
        ('{"n": null}', 1),
        ('{"n": -3}', 1),
        ('{"n": 99999999999}', MANY_JOBS),
        ('{"n": 3.' + "0" * 100 + "}", MANY_JOBS),  # it is 3, and nobody writes it so
        ('{"n": 1, "n": 5, "n": 2}', 5),
        ('{"x": {"n": 7}, "messages": [{"n": 7}]}', 1),
        ('{"prompt": [1, 2, 3]}', 1),  # the ids of one prompt
        ('{"prompt": ["text", 3, "text"]}', 1),
        ('{"prompt": [[1, 2], [3], "text"]}', 3),
        ('{"prompt": []}', 1),
        ('{"prompt": [{"prompt_string": "a", "x": [1, 2]}, "b"]}', 2),
        ('{"prompt": {"prompt_string": "a", "x": [1, 2]}}', 1),
        ('{"prompt": [true, null]}', 2),
        ('{"input": ["a", "b", "c"]}', 1),  # on this route it is something else
        ('{"pro\\u006dpt": ["a", "b"]}', 2),
        ('{"prompt": ["a"], "prompt": ["a", "b", "c"], "prompt": "a"}', 3),
        ('{"x": ["a", "b"], "y": {"prompt": ["a", "b"]}}', 1),
        ('[{"prompt": ["a", "b"]}]', 1),
        ('\ufeff {"prompt": ["a\\"]", "b"]}', 2),
        ('{"' + "k" * 300 + '": 1, "prompt": ["a", "b"]}', 2),
        ('{"\\ud800": ["a", "b"]}', 1),
        ("]]]", 1),
        ("", 1),
        (form_of(*["prompt"] * 3, "n", "model", "max_tokens"), 3),
        (form_of("prompt", "n", "model", "max_tokens"), 1),
        (form_of("prompt", 'x"; filename="a; name=b.wav', 'y"; filename*="UTF-8'), 1),
        (form_of("x", 'y"; name="prompt', "pr%6fmpt", "prompt; a=b"), 3),  # odd names count
        (form_of("prompt", "prompt").replace("Content-D", "content-d").replace('"', ""), 2),
        ("a preamble\r\n" + form_of("prompt", "prompt"), 2),
        ("--another\r\n" + form_of("prompt", "prompt"), 2),
        ("--b\r\nContent-Disposition: form-data; name=prompt\r", 1),
    ],
)
def test_the_jobs_of_a_body_are_counted_wherever_it_is_cut(body: str, jobs: int) -> None:
    raw = body.encode()
    assert in_pieces(raw).jobs == jobs
    assert in_pieces(raw, *range(1, len(raw))).jobs == jobs
    for cut in range(len(raw)):
        assert in_pieces(raw, cut).jobs == jobs, cut


def test_the_files_of_a_form_are_not_read() -> None:
    audio = b'{"prompt":["a","b"],"n":9}' + b"[" * 1000 + bytes(range(256)) * 1000
    assert scanned(form_of("prompt").encode().replace(b'["a", "b"]', audio), (b"prompt",)).jobs == 1


def test_a_line_of_a_form_that_does_not_end_counts_as_one_field() -> None:
    scan = BodyScan((b"prompt",))
    for piece in (b"--b\r\nContent-Disposition: form-data; name=x", b" " * 5000, b"\r\n"):
        scan.feed(piece)
    assert (scan.jobs, scan.unclear, scan._fields) == (1, False, 1)


def test_a_form_of_too_many_parts_counts_as_heavy() -> None:
    assert scanned(form_of(*["x"] * (MAX_STEPS + 1)).encode(), (b"prompt",)).jobs == MANY_JOBS


def test_the_members_of_questions_are_counted() -> None:
    body = b'{"questions": {"a": {"type": "noul"}, "b": {"type": "score", "criteria": ["x", "y"]}}}'
    assert scanned(body, (b"questions",)).jobs == 2
    assert scanned(b'{"questions": ["a", "b"]}', (b"questions",)).jobs == 1  # refused by llama-server


@given(bodies(), st.sampled_from(sorted(LABELS)), st.data())
def test_as_many_jobs_are_counted_as_the_oracle_counts(body: bytes, label: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)))
    counted_as_the_oracle_counts(body, label, cuts)


def test_beyond_the_windows_of_one_piece_the_same_is_found() -> None:
    text = json.dumps('"\\' * WINDOW)
    body = f'{{"x": {text}, "prompt": [{text}, {text}, [{"1, " * WINDOW}1]]}}'.encode()
    assert scanned(body, (b"prompt",)).jobs == 3


def test_a_body_with_too_many_tokens_counts_as_heavy_and_is_read_no_further() -> None:
    assert (
        scanned(b'{"prompt": [' + b'"", ' * (MAX_STEPS // 2) + b'""]}', (b"prompt",)).jobs
        == MAX_STEPS // 2 + 1
    )
    scan = scanned(b'{"prompt": [' + b'"", ' * (MAX_STEPS + 1) + b'""]}', (b"prompt",))
    assert (scan.jobs, scan.unclear) == (MANY_JOBS, True)
    scan.feed(b'"http')
    assert (scan.jobs, scan.suspect) == (MANY_JOBS, False)  # URLs were not asked for


@pytest.mark.parametrize("text", [b'["a", "b"]', form_of("x", "x", "x", "x").encode()])
def test_the_number_of_tokens_can_be_limited_further(text: bytes) -> None:
    assert not scanned(text, (b"prompt",), most_steps=4).unclear
    assert scanned(text, (b"prompt",), most_steps=3).unclear


def test_a_body_that_is_nested_too_deep_counts_as_heavy() -> None:
    assert scanned(b"[" * MAX_DEPTH).jobs == 1
    assert scanned(b"[" * (MAX_DEPTH + 1)).jobs == MANY_JOBS


@given(
    st.lists(
        st.binary(max_size=8) | st.sampled_from([b'"', b"\\", b"{", b"[", b"}", b"]", b'"n":', b'"prompt":['])
    )
)
def test_arbitrary_bytes_raise_no_error(pieces: list[bytes]) -> None:
    scan = BodyScan((b"prompt", b"questions"), urls=True)
    for piece in pieces:
        scan.feed(piece)
    assert scan.jobs >= 1


# --- URLs


def chat(part: object, **message: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": [part], **message}]})


FETCHED = {
    "a chat's image": chat({"type": "image_url", "image_url": {"url": URL}}),
    "its type comes last": chat({"image_url": {"detail": "low", "url": URL}, "type": "image_url"}),
    "audio": chat({"type": "input_audio", "input_audio": {"data": URL}}),
    "audio by url": chat({"type": "input_audio", "input_audio": {"url": URL}}),
    "a video": chat({"type": "input_video", "input_video": {"data": URL}}),
    "a video by its other name": chat({"type": "video_url", "video_url": {"url": URL}}),
    "a message's source": chat({"type": "image", "source": {"type": "url", "url": URL}}),
    "a tool's result": chat(
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}
    ),
    "a response's image": json.dumps(
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}
    ),
    "a call's output": json.dumps(
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": URL}]}]}
    ),
    "an embedding's image": json.dumps(
        {"input": [{"content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
    ),
    "one of two": chat({"type": "image_url", "image_url": {"url": URL}}).replace(
        '{"url"', '{"url": "data:image/png;base64,", "url"'
    ),
    "escaped slashes": chat({"type": "image_url", "image_url": {"url": URL}}).replace("//", "\\/\\/"),
    "an escaped scheme": chat({"type": "image_url", "image_url": {"url": URL}}).replace(
        "http", "\\u0068tt\\u0070"
    ),
    "an escaped key": chat({"type": "image_url", "image_url": {"url": URL}}).replace(
        "url", "\\u0075r\\u006C"
    ),
    "behind what is no part": chat(7, tool_calls=[{"function": {"arguments": {"q": 1}}}]).replace(
        "[7]", json.dumps([{"input": {"url": "x"}}, {"image_url": {"url": URL}}])
    ),
}


@pytest.mark.parametrize("body", FETCHED.values(), ids=FETCHED)
def test_urls_for_llama_server_are_found_for_any_split_of_the_body(body: str) -> None:
    raw = body.encode()
    for cuts in ((), range(1, len(raw)), *((cut,) for cut in range(len(raw)))):
        scan = in_pieces(raw, *cuts)
        assert (scan.remote, scan.suspect) == ([URL], True), cuts


@pytest.mark.parametrize(
    "body",
    [
        chat({"type": "text", "text": URL}),
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,aHR0cDovLw=="}}),
        chat({"type": "tool_use", "name": "get", "input": {"image_url": URL, "source": {"url": URL}}}),
        json.dumps({"messages": [{"role": "user", "content": URL}]}),
        json.dumps({"messages": [{"tool_calls": [{"function": {"arguments": {"image_url": URL}}}]}]}),
        json.dumps({"tools": [{"image_url": {"url": URL}}], "metadata": {"image_url": URL}, "prompt": [URL]}),
        json.dumps({"messages": [{"content": [{"type": "search_result", "source": URL}]}]}),
        json.dumps({"input": [URL, URL], "url": URL, "data": URL}),
        json.dumps({"messages": [{"content": [{"image_url": {"url": [URL]}}]}]}),
        json.dumps(URL),
    ],
)  # fmt: skip
def test_urls_in_text_for_the_model_are_ignored(body: str) -> None:
    assert scanned(body.encode(), urls=True).remote == []


def test_a_url_that_is_too_long_or_no_text_is_found_and_not_read() -> None:
    for url in ("http://" + "x" * 9000, "http\\ud800"):
        assert scanned(b'{"image_url": "%b"}' % url.encode(), urls=True).remote == [None]


def test_each_url_is_reported_once_up_to_a_limit() -> None:
    urls = [f"http://{number // 2}.example" for number in range(200)]
    assert len(scanned(json.dumps([{"image_url": url} for url in urls]).encode(), urls=True).remote) == 64


@pytest.mark.parametrize("pieces", [(b'"h', b"tt", b"p://"), (b'"\\u00', b"7", b"0://"), (b'"http',)])
def test_a_suspect_string_is_seen_also_where_nothing_is_read_any_more(pieces: tuple[bytes, ...]) -> None:
    scan = BodyScan(urls=True)
    scan.feed(b"[" * (MAX_DEPTH + 1))
    seen = []
    for piece in pieces:
        scan.feed(piece)
        seen.append(scan.suspect)
    assert seen == [False] * (len(pieces) - 1) + [True]
    assert scan.unclear


ALLOWED = ("good.example", "10.0.0.5:8000", "[fd00::1]")


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/x.png",
        "https://good.example",
        "https://GOOD.example:443/a/b?c=d&e=%20#f",
        "http://good.example:80/",
        "http://10.0.0.5:8000/x",
        "https://10.0.0.5:8000/x",
        "http://[fd00::1]/x",
    ],
)
def test_a_plain_url_of_an_allowed_host_passes(url: str) -> None:
    assert refused_media([url], ALLOWED) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://bad.example/x",
        "http://good.example.bad.example/",
        "http://bad.example/good.example",
        "http://good.example:8080/",  # another port is another server
        "http://good.example:443/",
        "http://10.0.0.5/",
        "http://user@good.example/",
        "http://good.example@bad.example/",
        "http://good.example/@bad.example/",  # llama-server takes all before it for a user
        "http://good.example/x?y=@bad.example/",
        "http://good.example\\@bad.example/",
        "http://good.example\\x",
        "http://good.example#.bad.example/",
        "http://good.example?.bad.example/",
        "http://good.example. /",
        "http://good.example./",
        "http://good.example:/",
        "http://good.example:080/",
        "http://good.example/a b",
        "http://good.example/\r\nHost: bad.example",
        "http://good.example/\u00e9",
        "http:good.example",
        "http:/good.example/",
        "http:///good.example/",
        "HTTP://good.example/",
        "httpx://good.example/",
        " http://good.example/",
        "http",
        None,
    ],
)
def test_any_other_host_and_every_ambiguous_url_is_refused(url: str | None) -> None:
    error = refused_media(["http://good.example/", url], ALLOWED)
    assert error is not None
    assert (error.status, error.cause) == (400, "remote_media")


def test_refusal_names_the_host_and_the_remedy() -> None:
    error = refused_media(["http://169.254.169.254/latest/meta-data/"], ())
    assert error is not None
    assert "'169.254.169.254'" in error.message
    assert "latest" not in error.message
    assert "data: URL" in error.remedy
    assert "http.remote_media" in error.remedy
    with_port = refused_media(["http://localhost:8080/"], ())
    unreadable = refused_media(["http://a@b/"], ())
    long = refused_media(["http://" + "a" * 5000], ())
    assert with_port is not None
    assert unreadable is not None
    assert long is not None
    assert "'localhost:8080'" in with_port.message
    assert "a remote URL" in unreadable.message
    assert len(long.message) < 300
