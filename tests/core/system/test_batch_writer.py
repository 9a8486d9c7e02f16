"""The thread that formats and writes lines in batches."""

from __future__ import annotations

import logging
import threading

import pytest

from llamasup.core.system.batch_writer import BATCH, BatchWriter
from tests.kit.patience import PATIENCE_S


class Sink:
    """Collects the batches. ``hold`` blocks the writer; ``ends`` makes it end."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()
        self.ends = False

    def write(self, items: list[int]) -> bool:
        self.entered.set()
        assert self.hold.wait(PATIENCE_S)
        self.batches.append(items)
        return not self.ends

    @property
    def written(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


def test_items_are_written_in_order_and_in_batches() -> None:
    sink = Sink()
    writer = BatchWriter(sink.write, name="w", linger_s=3600.0)
    for number in range(3 * BATCH + 1):
        writer.put(number)
    assert writer.close(PATIENCE_S)
    assert sink.written == list(range(3 * BATCH + 1))
    assert max(map(len, sink.batches)) == BATCH
    assert len(sink.batches) == 4


class NoThreads:
    """A system that starts no further thread for a while, as one whose ``pids.max`` is reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = 0
        start = threading.Thread.start

        def start_if_allowed(thread: threading.Thread) -> None:
            if self.left > 0:
                self.left -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_allowed)


def test_thread_that_could_not_start_starts_with_a_later_item(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system, sink = NoThreads(monkeypatch), Sink()
    system.left = 3
    writer = BatchWriter(sink.write, name="w", linger_s=0.0)
    for number in range(5):
        writer.put(number)
    assert sink.entered.wait(PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert sink.written == list(range(5))
    (warning,) = caplog.messages
    assert warning == "The thread 'w' cannot start yet, and its output waits: can't start new thread"


@pytest.mark.parametrize("failures", [2, float("inf")])
def test_close_writes_what_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch, failures: float) -> None:
    system, sink = NoThreads(monkeypatch), Sink()
    system.left = failures
    writer = BatchWriter(sink.write, name="w", linger_s=3600.0, max_waiting=2)
    for number in range(2):
        writer.put(number)
    assert writer.close(PATIENCE_S)
    assert (sink.written, writer.rejected) == ([0, 1], 0)


def test_close_without_items_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    NoThreads(monkeypatch).left = float("inf")
    assert BatchWriter(Sink().write, name="w", linger_s=0.0).close(PATIENCE_S)


def test_item_that_hurries_is_written_with_all_before_it() -> None:
    sink = Sink()
    writer = BatchWriter(sink.write, name="w", linger_s=3600.0)
    writer.put(1)
    assert not sink.entered.is_set()  # it lingers
    writer.put(2, hurry=True)
    assert sink.entered.wait(PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert sink.written == [1, 2]


def test_put_never_waits_and_counts_what_waits() -> None:
    sink = Sink()
    sink.hold.clear()
    writer = BatchWriter(sink.write, name="w", linger_s=0.0)
    writer.put(0, hurry=True)
    assert sink.entered.wait(PATIENCE_S)
    for number in range(1, 1001):
        writer.put(number)
    assert len(writer) == 1000
    assert not writer.close(0.01)  # returns although the writer is busy
    sink.hold.set()
    assert writer.close(PATIENCE_S)
    assert sink.written == list(range(1001))


def test_exception_loses_its_batch_alone_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []

    def write(items: list[int]) -> bool:
        if items[0] < 2 * BATCH:
            raise RuntimeError("no such luck")
        written.extend(items)
        return True

    writer = BatchWriter(write, name="w", linger_s=3600.0)
    for number in range(3 * BATCH):
        writer.put(number)
    assert writer.close(PATIENCE_S)
    assert written == list(range(2 * BATCH, 3 * BATCH))
    assert writer.lost == 2 * BATCH
    assert caplog.messages == ["The thread 'w' has lost what it had to write"]


def test_thread_that_ends_keeps_no_items(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def write(_: list[int]) -> bool:
        raise GeneratorExit  # no Exception

    writer = BatchWriter(write, name="w", linger_s=3600.0)
    for number in range(2 * BATCH):
        writer.put(number)
    assert writer.close(PATIENCE_S)
    writer.put(1)
    assert len(writer) == 0
    assert seen == [GeneratorExit]


def test_full_queue_rejects_and_counts_further_items() -> None:
    sink = Sink()
    sink.hold.clear()
    writer = BatchWriter(sink.write, name="w", linger_s=0.0, max_waiting=10)
    writer.put(0, hurry=True)
    assert sink.entered.wait(PATIENCE_S)
    for number in range(1, 14):
        writer.put(number)
    assert (len(writer), writer.rejected) == (10, 3)
    sink.hold.set()
    assert writer.close(PATIENCE_S)
    assert sink.written == list(range(11))


def test_writer_that_cannot_write_drops_everything() -> None:
    sink = Sink()
    sink.ends = True
    writer = BatchWriter(sink.write, name="w", linger_s=0.0)
    writer.put(1, hurry=True)
    assert writer.close(PATIENCE_S)
    writer.put(2)
    assert len(writer) == 0
    assert sink.written == [1]


def test_closed_without_an_item_starts_no_thread() -> None:
    before = set(threading.enumerate())
    assert BatchWriter(Sink().write, name="w", linger_s=0.0).close(PATIENCE_S)
    assert set(threading.enumerate()) <= before


def test_items_of_several_threads_are_all_written() -> None:
    sink = Sink()
    writer = BatchWriter(sink.write, name="w", linger_s=0.0)

    def put_all() -> None:
        for number in range(1000):
            writer.put(number)

    threads = [threading.Thread(target=put_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(PATIENCE_S)
    assert sorted(sink.written) == sorted(list(range(1000)) * 4)


def test_warning_that_the_same_writer_has_to_write_does_not_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of threads, the log of llamasup is itself such a writer."""
    written: list[str] = []

    def write(texts: list[str]) -> bool:
        written.extend(texts)
        return True

    writer: BatchWriter[str] = BatchWriter(write, name="log", linger_s=0)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            writer.put(record.getMessage())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    handler = Handler()
    logging.getLogger("llamasup.core.system.batch_writer").addHandler(handler)
    try:
        writer.put("first")
        assert writer.close(1.0)
    finally:
        logging.getLogger("llamasup.core.system.batch_writer").removeHandler(handler)
    assert written[0] == "first"
    assert written[1].startswith("The thread 'log' cannot start yet")
