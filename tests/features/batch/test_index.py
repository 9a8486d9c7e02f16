"""The index and the output: which lines are over, after any interruption."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from llamasup.errors import DiskFull, OutputFailed
from llamasup.features.batch.index import BatchInvalid, Counts, Index, InputChanged, LineState, in_thread
from llamasup.features.batch.lines import template_of
from llamasup.features.batch.output import Output, answer_line, error_line, is_answer
from tests.kit.async_tests import async_test


def line(id_: str, prompt: str = "x", model: str = "") -> str:
    body = {"prompt": prompt, **({"model": model} if model else {})}
    return json.dumps({"custom_id": id_, "url": "/v1/completions", "body": body})


def text(*lines: str) -> BytesIO:
    return BytesIO("\n".join(lines).encode())


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "out.jsonl.index") as opened:
        yield opened


def ids(index: Index) -> list[str]:
    model, found = index.next_model(LineState.WAITING, None), []
    while model is not None:
        found += [one.custom_id for one in index.lines_of(model, LineState.WAITING, None, 100)]
        model = index.next_model(LineState.WAITING, model)
    return found


def settled(tmp_path: Path, index: Index) -> Output:
    output = Output(tmp_path / "out.jsonl")
    output.settle(index)
    return output


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def done(id_: str) -> bytes:
    return answer_line("batch_req_i", id_, 200, "r", b'{"a":\n1}')


# --- the input


def test_lines_are_in_the_order_of_models_and_prefixes(index: Index) -> None:
    long_a, long_b = "A" * 2000, "B" * 2000
    index.read_input(
        text(
            line("1", long_a + "1", "m2"),
            line("2", long_b + "1", "m1"),
            line("3", long_a + "1", "m1"),
            line("4", long_b + "2", "m1"),
            line("5", long_a + "2", "m1"),
        )
    )
    order = ids(index)
    assert order[-1] == "1"  # of another model
    assert order[:4] in (["2", "4", "3", "5"], ["3", "5", "2", "4"])
    assert [(model, count) for model, _, count in index.models()] == [("m2", 1), ("m1", 4)]


def test_lines_come_in_parts(index: Index) -> None:
    index.read_input(text(*(line(str(number)) for number in range(7))))
    after, seen = None, []
    while part := index.lines_of("", LineState.WAITING, after, 3):
        seen += [one.custom_id for one in part]
        after = part[-1].place
    assert sorted(seen) == [str(number) for number in range(7)]


@pytest.mark.parametrize(
    ("lines", "options", "details"),
    [
        (
            (line("a"), "{", line("a"), line("\ud83d"), "[1]"),
            {},
            (
                "line 2: invalid JSON: ",
                "line 3: custom_id 'a' is also that of line 1",
                "line 4: invalid JSON: ",
                "line 5: ",
            ),
        ),
        (["{"] * 3000, {}, (*(f"line {n}: invalid JSON: " for n in range(1, 21)), "and at least 980 more")),
        ((line("a" * 100),), {"most_bytes": 50}, ("line 1: it has 168 B; a line may have 50 B",)),
        ((line("a"), line("b")), {"most_lines": 1}, ("line 2: there are more than 1 lines",)),
        (("", ""), {}, ()),
    ],
)
def test_mistakes_are_listed_by_line_and_nothing_is_kept(
    index: Index, lines: Sequence[str], options: Mapping[str, Any], details: Sequence[str]
) -> None:
    with pytest.raises(BatchInvalid, match="mistakes in" if details else "no lines") as caught:
        index.read_input(text(*lines), **options)
    assert len(caught.value.details) == len(details)
    for found, expected in zip(caught.value.details, details, strict=True):
        assert found.startswith(expected)
    assert index.counts() == Counts()


@pytest.mark.parametrize("changes", [{"method": "G" * 9000}, {"url": "/" * 9000}, {"body": {"x" * 9000: ()}}])
def test_text_of_a_mistake_is_short(index: Index, changes: dict[str, object]) -> None:
    wrong = json.loads(line("a" * 500)) | changes
    with pytest.raises(BatchInvalid) as caught:
        index.read_input(text(line("a" * 500), json.dumps(wrong)))
    [(number, mistake)] = caught.value.mistakes
    assert number == 2
    assert len(mistake) <= 200


def test_reading_reports_its_progress_and_may_be_ended_early(index: Index) -> None:
    def end(read: int) -> None:
        raise EOFError

    lines, seen = [line(str(number), "x" * 1000) for number in range(600)], list[int]()
    with pytest.raises(EOFError):
        index.read_input(text(*lines), on_progress=end)
    assert index.counts() == Counts()
    index.read_input(text(*lines), on_progress=seen.append)
    assert len(seen) == 2
    assert 1 << 18 <= seen[0] < seen[1]


def test_prompts_are_read_with_their_template(index: Index) -> None:
    template = template_of(None, "/v1/completions")
    index.read_input(text('"Once"', '{"custom_id": "k", "prompt": "x"}'), template=template)
    assert sorted(ids(index)) == ["k", "line-1"]
    with pytest.raises(BatchInvalid, match="1 line"):
        index.read_input(text('"Once"', "7"), template=template)


# --- the input changes


@pytest.fixture
def begun(index: Index, tmp_path: Path) -> Index:
    """``a`` is done, ``b`` has failed, ``c`` waits."""
    index.read_input(text(line("a"), line("b"), line("c")))
    output = settled(tmp_path, index)
    end = output.append([done("a"), error_line("batch_req_i", "b", "code", "message")])
    index.save({1: LineState.DONE, 2: LineState.FAILED}, output_bytes=end)
    output.close()
    return index


def test_added_and_changed_lines_that_wait_are_taken_over(begun: Index) -> None:
    begun.read_input(text(line("new"), line("b"), line("a"), line("c", "other")))
    assert sorted(ids(begun)) == ["c", "new"]
    assert begun.counts() == Counts(4, 1, 1)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((line("a", "other"), line("b")), "custom_id 'a': line 1 has changed"),
        ((line("b"), line("c")), "custom_id 'a': the line is gone"),
    ],
)
def test_change_of_a_line_that_is_over_is_refused(begun: Index, lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputChanged) as caught:
        begun.read_input(text(*lines))
    assert caught.value.details == (why,)
    assert begun.counts() == Counts(3, 1, 1)


def test_changed_template_is_a_change_of_lines_that_are_over(index: Index) -> None:
    lines = ('{"custom_id": "a", "word": "fox"}', '{"custom_id": "b", "word": "owl"}')
    before, after = (
        template_of(f'{{"prompt": "{verb} $word"}}', "/v1/completions") for verb in ("Say", "Sing")
    )
    index.read_input(text(*lines), template=before)
    index.save({1: LineState.DONE})
    index.read_input(text(*lines), template=before)
    with pytest.raises(InputChanged) as caught:
        index.read_input(text(*lines), template=after)
    assert caught.value.details == ("custom_id 'a': line 1 has changed",)


# --- the output


def test_output_tells_the_index_what_it_does_not_know(index: Index, tmp_path: Path) -> None:
    """As after a kill between the block and the index."""
    index.read_input(text(line("a"), line("b"), line("c")))
    output = settled(tmp_path, index)
    output.append([done("a"), error_line("batch_req_i", "b", "code", "message")])
    output.close()
    settled(tmp_path, index).close()
    assert index.counts() == Counts(3, 1, 1)
    assert ids(index) == ["c"]


@pytest.mark.parametrize("cut", range(1, len(done("b")), 7))
def test_torn_last_line_is_removed_and_runs_again(index: Index, tmp_path: Path, cut: int) -> None:
    index.read_input(text(line("a"), line("b")))
    path = tmp_path / "out.jsonl"
    path.write_bytes(done("a") + done("b")[:-cut])
    output = settled(tmp_path, index)
    assert path.read_bytes() == done("a")
    assert ids(index) == ["b"]
    output.append([done("b")])
    output.close()
    assert path.read_bytes() == done("a") + done("b")


def test_torn_first_line_of_a_run_is_removed(index: Index, tmp_path: Path) -> None:
    index.read_input(text(line("a"), line("b")))
    settled(tmp_path, index).close()
    path = tmp_path / "out.jsonl"
    zeros = bytes(100)  # as after a power cut
    for torn in (b'{"id', zeros, done("a")[:30], done("a")[:30] + bytes(9) + b"\n"):
        path.write_bytes(torn)
        settled(tmp_path, index).close()
        assert path.read_bytes() == b""
    path.write_bytes(done("a") + zeros + b"\n")
    settled(tmp_path, index).close()
    assert path.read_bytes() == done("a")


def test_output_that_another_file_has_replaced_is_read_from_its_beginning(
    begun: Index, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    new = tmp_path / "new"
    new.write_bytes(done("c") + done("b") + done("a"))
    new.replace(path)
    settled(tmp_path, begun).close()
    assert begun.counts() == Counts(3, 3, 0)
    new.write_bytes(b"x" * 3_000_000)
    new.replace(path)
    with pytest.raises(OutputFailed, match="at byte 0"):
        settled(tmp_path, begun)
    assert path.read_bytes() == b"x" * 3_000_000


def test_output_without_its_index_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(done("a"))
    with Index(tmp_path / "new.index") as index:
        index.read_input(text(line("a"), line("b")))
        settled(tmp_path, index).close()
        assert ids(index) == ["b"]


def test_lines_run_again_if_the_output_was_removed(begun: Index, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").unlink()
    settled(tmp_path, begun).close()
    assert sorted(ids(begun)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (done("z"), "'z', which the input does not have"),
        (done("a") + done("a"), "twice"),
        (b"hello\n" + done("a"), "invalid line at byte 0"),
        (b"my notes\n", "invalid line at byte 0"),
        (b"my notes", "invalid line at byte 0"),
        (b"{", "invalid line at byte 0"),
        (bytes(100), "invalid line at byte 0"),
        (done("a") + b"my notes\n", "invalid line at byte"),
        (done("a") + b"my notes", "invalid line at byte"),
        (done("a") + done("b")[:-3] + b"\n", "invalid line at byte"),
        (line("a").encode() + b"\n", "invalid line at byte 0"),
    ],
)
def test_output_of_another_batch_is_not_touched(
    index: Index, tmp_path: Path, content: bytes, why: str
) -> None:
    index.read_input(text(line("a"), line("b")))
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(OutputFailed, match=why):
        settled(tmp_path, index)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"oh\xff no", "oh\ufffd no"),  # kept as text
        (b'{"a":\r\n1}', {"a": 1}),
        (b'[{"index": 0, "score": 1.5}]', [{"index": 0, "score": 1.5}]),
    ],
)
def test_answer_is_one_line(body: bytes, shown: object) -> None:
    written = answer_line("i", "a", 500, "r", body)
    assert json.loads(written)["response"] == {"status_code": 500, "request_id": "r", "body": shown}
    assert written.count(b"\n") == 1


@pytest.mark.parametrize(("status", "is_one"), [(200, True), (201, True), (302, False), (400, False)])
def test_only_a_status_of_success_is_an_answer(status: int, is_one: bool) -> None:
    assert is_answer(answer_line("i", "a", status, "r", b"{}")) == is_one


def test_full_disk_leaves_no_part_of_a_block(index: Index, tmp_path: Path) -> None:
    index.read_input(text(line("a"), line("b")))
    output = settled(tmp_path, index)
    end = output.append([done("a")])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (end + 10, before[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(DiskFull, match="cannot grow"):
            output.append([done("b")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "out.jsonl").read_bytes() == done("a")
    output.append([done("b")])
    output.close()
    assert (tmp_path / "out.jsonl").read_bytes() == done("a") + done("b")


def test_index_in_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed, match=os.strerror(errno.ENOENT)):
        Index(tmp_path / "none" / "x.index")
    with pytest.raises(OutputFailed, match=os.strerror(errno.ENOENT)):
        Output(tmp_path / "none" / "x")


@pytest.mark.parametrize(
    ("spoil", "why", "remedy"),
    [
        (lambda path: path.write_bytes(b"no database " * 1000), "not a database", "remove it"),
        (newer, "newer llamasup", "Upgrade"),
        (Path.mkdir, "Is a directory", "another output"),
        (lambda path: path.symlink_to("nowhere"), "No such file", "another output"),
    ],
)
def test_index_that_cannot_be_used_is_an_error_with_a_remedy(
    tmp_path: Path, spoil: Callable[[Path], object], why: str, remedy: str
) -> None:
    spoil(tmp_path / "x.index")
    with pytest.raises(OutputFailed, match=why) as caught:
        Index(tmp_path / "x.index")
    assert remedy in caught.value.remedy


# --- calls from the event loop


@async_test
async def test_result_and_error_come_from_the_thread() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@async_test
async def test_cancelled_caller_waits_for_the_end_of_the_thread(times: int, fails: bool) -> None:
    began, may_end, ended = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def act() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        ended.set()
        if fails:
            raise ZeroDivisionError

    calling = loop.create_task(in_thread(act))
    await began.wait()
    for _ in range(times):
        calling.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
    assert not calling.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()
