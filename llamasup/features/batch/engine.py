"""Runs a batch: one task owns it, starts its lines, decides what follows from their ends, and saves them.

The decisions are in ``schedule.py``, and the order of the lines is in ``lines.py``. Memory does not grow with
the number of lines: it holds those in flight, the next ones of a few models, and a block of the output.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from time import monotonic
from typing import Final

from msgspec import Struct

from llamasup.core.llama_server.schema_check import asked_json, violation
from llamasup.core.queueing.wait_estimate import smoothed
from llamasup.core.system.native import native
from llamasup.core.system.text import printable
from llamasup.errors import LlamasupError, NotAllowed
from llamasup.features.batch.client import Answer, BatchClient, tokens_of
from llamasup.features.batch.index import Counts, Index, IndexedLine, LineState, fingerprint, in_thread
from llamasup.features.batch.lines import BatchLine, PromptTemplate, TemplateInvalid, read_line
from llamasup.features.batch.output import Block, Output, answer_line, error_line
from llamasup.features.batch.schedule import (
    FIRST_LIMIT,
    MAX_LIMIT,
    PREEMPTED,
    UNREACHABLE,
    Again,
    Aside,
    Ended,
    Refusal,
    Stop,
    Waiting,
    Window,
    decide,
    limit_after_refusal,
    next_limit,
)
from llamasup.features.batch.streams import STREAM_ABOVE_S

FETCH: Final = 256
MAX_DELAYED: Final = 256
"""Lines that wait for another try. While there are more, no new line starts."""
PATIENCE_S: Final = 600.0
SKIP_AFTER_S: Final = 60.0
"""How long a model may refuse all lines before those of the next model run. It may be loading, and the next
one would take its memory."""
MAX_SKIPPED: Final = 16
"""Models that are skipped. Of each, ``FETCH`` lines are in memory."""
_THREAD_BYTES: Final = 1 << 16  # a larger line is read in a thread
_ANSWER_WEIGHT: Final = 0.1
_REASON_CHARACTERS: Final = 300
_WINDOW_CHECK_S: Final = 30.0  # the clock may be set


class BatchStopped(LlamasupError):
    """The batch cannot continue now. All finished lines are saved."""

    exit_code = 75
    http_status = 503
    cause = "batch_stopped"


class EngineOptions(Struct, frozen=True):
    """Limits of a run. ``concurrency`` None means as many lines as the server can use. ``patience_s`` is how
    long no line may be served because of trouble, before the run stops.
    """

    concurrency: int | None = None
    patience_s: float = PATIENCE_S
    only_between: Window | None = None


class Progress(Struct):
    """The live counts of a run. ``put_back``: requests that were ended for other clients; ``events_lost``:
    the events of their streams until then, about a token each. ``began_s``: monotonic. ``waiting``: why no
    line runs now; empty if lines run.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    put_back: int = 0
    events_lost: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_completion: int = 0
    ended_here: int = 0
    began_s: float = 0.0
    state: str = "running"
    waiting: str = ""

    @property
    def left(self) -> int:
        return self.total - self.done - self.failed

    def rates(self, now_s: float) -> tuple[float, float | None]:
        """Return the tokens of answers per second, and the seconds that are left. None means unknown."""
        taken_s = max(now_s - self.began_s, 0.001)
        left_s = taken_s * self.left / self.ended_here if self.ended_here else None
        return self.tokens_completion / taken_s, left_s


class _Attempt(Struct, eq=False):
    """An unfinished line, with what happened to it in this run."""

    line: IndexedLine
    alone: bool
    tries: int
    drops: int = 0
    limited_s: float = 0.0
    alone_crashes: int = 0
    asked_again: bool = False


class _Model:
    """The next lines of a model. ``left``: how many were fetched and are not finished.

    ``refused_since_s``: since when the model refuses all lines; infinity: it does not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[_Attempt] = deque()
        self.left = 0
        self.in_flight = 0
        self.place: tuple[bytes, int] | None = None
        self.all_fetched = False
        self.paused_until_s = 0.0
        self.refused_since_s = inf

    def waits(self, now_s: float) -> bool:
        """Whether no line of it may start: one at a time finds out whether it still refuses them."""
        return now_s < self.paused_until_s or (self.refused_since_s <= now_s and self.in_flight > 0)


class BatchRun:
    """One run of a batch. ``source`` is a descriptor of the input. ``run`` returns when every line has its
    line in the output.

    Raises BatchStopped, NotAllowed, DiskFull, OutputFailed. ``stop`` ends it early: finished lines are saved.
    """

    def __init__(
        self,
        index: Index,
        output: Output,
        source: int,
        client: BatchClient,
        options: EngineOptions,
        *,
        template: PromptTemplate | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._index = index
        self._source = source
        self._client = client
        self._options = options
        self._template = template
        self._on_progress = on_progress
        self.progress = Progress()
        self._answer_s: float | None = None  # how long an answer takes, with its wait in the queue
        self._limit = float(options.concurrency or FIRST_LIMIT)
        self._models: dict[str, _Model] = {}  # with unfinished lines, in the order of the batch
        self._last_model: str | None = None
        self._all_models = False
        self._delayed: list[tuple[float, int, _Attempt]] = []
        self._order = count()
        self._in_flight: set[_Attempt] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._ended: deque[tuple[_Attempt, Answer, str | None]] = deque()
        self._wake = asyncio.Event()
        self._runs_aside = False  # the lines that were set aside, one by one
        self._paused_until_s = 0.0
        self._trouble_since_s: float | None = None
        self._trouble = ""
        self._told: str | None = None  # why no line runs, as the index has it
        self._block = Block(output, index)
        self._stopping = False
        self._id_prefix = f"batch_req_{secrets.token_hex(6)}"

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def run(self) -> Counts:
        counts = await in_thread(self._index.counts)
        progress = self.progress
        progress.total, progress.done, progress.failed = counts.total, counts.done, counts.failed
        progress.began_s = monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._run(tasks)
                finally:
                    for task in tuple(self._requests):
                        task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await in_thread(self._block.save)
        return await in_thread(self._index.counts)

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping:
            now_s = monotonic()
            wake_s = await self._start_lines(tasks, now_s)
            await self._say_why_it_waits()
            if self._all_models and not self._models:
                if self._runs_aside:
                    return
                await in_thread(self._block.save)
                self._runs_aside, self._all_models, self._last_model = True, False, None
                continue
            await self._wait(min(wake_s, self._block.due_s))
            while self._ended:
                self._take(*self._ended.popleft())
            now_s = monotonic()
            if now_s >= self._block.due_s:
                await in_thread(self._block.save)
            self._check_patience(now_s)

    async def _wait(self, until_s: float) -> None:
        """Wait until a request ends, the time has come, or ``stop`` is called."""
        self._wake.clear()
        if self._ended or self._stopping:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - monotonic())):
                await self._wake.wait()

    # --- starting lines

    async def _start_lines(self, tasks: asyncio.TaskGroup, now_s: float) -> float:
        """Start the lines that may start now. Returns when to look again."""
        window = self._options.only_between
        if window is not None:
            opens_s = window.opens_in(datetime.now(UTC).astimezone()).total_seconds()
            if opens_s > 0:
                self.progress.state = "outside of its hours"
                return now_s + min(opens_s, _WINDOW_CHECK_S)
        if now_s < self._paused_until_s:
            return self._paused_until_s
        self.progress.state = "running"
        while self._delayed and self._delayed[0][0] <= now_s:
            attempt = heappop(self._delayed)[2]
            self._models[attempt.line.model].ready.append(attempt)
        look_s = now_s + _WINDOW_CHECK_S
        if self._delayed:
            look_s = min(look_s, self._delayed[0][0])
        limit = 1 if self._runs_aside else int(self._limit)
        position = skipped = 0
        while len(self._in_flight) < limit:
            if position == len(self._models) and not await self._add_model():
                break
            model = list(self._models.values())[position]
            if model.waits(now_s):
                skip_s = model.refused_since_s + SKIP_AFTER_S
                look_s = min((look_s, *(at_s for at_s in (model.paused_until_s, skip_s) if at_s > now_s)))
                if now_s < skip_s or skipped == MAX_SKIPPED:
                    break
                position += 1
                skipped += 1
            elif model.ready:
                if self._runs_aside and self._delayed:
                    break
                self._start(tasks, model)
            elif not model.all_fetched and len(self._delayed) < MAX_DELAYED:
                await self._fetch(model)
            elif not model.all_fetched:
                break
            else:
                position += 1
        return look_s

    @property
    def _state(self) -> LineState:
        """Return the state of the lines that run now. At the end, these are the lines that were set aside."""
        return LineState.ASIDE if self._runs_aside else LineState.WAITING

    async def _add_model(self) -> bool:
        """Add the next model. Returns whether there was one."""
        if self._all_models:
            return False
        name = await in_thread(partial(self._index.next_model, self._state, self._last_model))
        if name is None:
            self._all_models = True
            return False
        self._last_model = name
        self._models[name] = _Model(name)
        return True

    async def _fetch(self, model: _Model) -> None:
        lines = await in_thread(partial(self._index.lines_of, model.name, self._state, model.place, FETCH))
        model.all_fetched = len(lines) < FETCH
        if lines:
            model.place = lines[-1].place
            model.ready.extend(_Attempt(line, self._runs_aside, line.tries) for line in lines)
            model.left += len(lines)
        self._drop_if_finished(model)

    def _drop_if_finished(self, model: _Model) -> None:
        if model.all_fetched and not model.left:
            del self._models[model.name]

    def _start(self, tasks: asyncio.TaskGroup, model: _Model) -> None:
        attempt = model.ready.popleft()
        model.in_flight += 1
        self._in_flight.add(attempt)
        task = tasks.create_task(self._request(attempt), name=f"batch/{attempt.line.number}")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _read(self, line: IndexedLine) -> BatchLine:
        """Read the line again. Raises BatchStopped if it has changed."""
        read_text = partial(native.read_at, self._source, line.size, line.offset)
        text = read_text() if line.size < _THREAD_BYTES else await in_thread(read_text)
        if self._template is not None:
            with suppress(TemplateInvalid):  # then it has changed
                text = self._template.fill(text, line.number)
        if fingerprint(text) != line.hash:
            raise BatchStopped(
                f"Line {line.number} of the input has changed since the run began.",
                remedy="Run the same command again: it checks the whole input.",
            )
        read = read_line(text)
        assert isinstance(read, BatchLine)  # as when the index was made
        return read

    async def _request(self, attempt: _Attempt) -> None:
        request = await self._read(attempt.line)
        began_s = monotonic()
        stream = self._answer_s is None or self._answer_s > STREAM_ABOVE_S
        answer = await self._client.send(request.url, request.body, stream=stream)
        if answer.refusal is None:
            self._answer_s = smoothed(self._answer_s, monotonic() - began_s, _ANSWER_WEIGHT)
        wrong = None
        if answer.refusal is None and (asked := asked_json(request.url, request.body)) is not None:
            # In a thread: a large answer takes a while.
            wrong = await asyncio.to_thread(violation, asked, answer.body)
        self._ended.append((attempt, answer, wrong))
        self._wake.set()

    # --- the end of a request

    def _take(self, attempt: _Attempt, answer: Answer, wrong: str | None) -> None:
        """Take an answer. ``wrong`` is why it is not what the line requests; then the line is sent again,
        once.
        """
        model = self._models[attempt.line.model]
        self._in_flight.discard(attempt)
        model.in_flight -= 1
        now_s = monotonic()
        refusal = answer.refusal
        self._note_trouble(refusal, now_s)
        alone = attempt.alone_crashes, attempt.alone
        decision = decide(Ended(refusal, attempt.tries, attempt.drops, attempt.limited_s, *alone))
        if isinstance(decision, Stop):
            assert refusal is not None
            raise NotAllowed(
                f"llamasup refuses the API key: {refusal.message}. The finished lines are in the output.",
                remedy="Give a key with the rights that the lines need, and run the same command again.",
            )
        if isinstance(decision, Again):
            assert refusal is not None
            self._again(attempt, model, refusal, decision, now_s, answer.events)
            return
        if not isinstance(decision, Aside):
            model.refused_since_s = inf
        if wrong is not None and not attempt.asked_again:
            attempt.asked_again = True
            model.ready.append(attempt)
            return
        model.left -= 1
        if isinstance(decision, Aside):
            self._block.set_state(attempt.line.number, LineState.ASIDE)
        else:
            self._finish(attempt, answer, wrong, poison=decision.poison)
        self._drop_if_finished(model)
        if refusal is None and self._options.concurrency is None:
            self._limit = next_limit(self._limit, answer.position, MAX_LIMIT)

    def _again(
        self, attempt: _Attempt, model: _Model, refusal: Refusal, decision: Again, now_s: float, events: int
    ) -> None:
        if refusal.cause == PREEMPTED:
            self.progress.put_back += 1
            self.progress.events_lost += events
        if decision.counts:
            attempt.tries += 1
            self._block.tries[attempt.line.number] = attempt.tries
        if refusal.status == 0 and refusal.cause != UNREACHABLE:
            attempt.drops += 1
        elif decision.crashed:
            attempt.alone_crashes += 1
        again_s = now_s + decision.delay_s
        if decision.waiting is Waiting.ALL:
            self._paused_until_s = again_s
        elif decision.waiting is Waiting.MODEL:
            model.paused_until_s = again_s
            model.refused_since_s = min(model.refused_since_s, now_s)
        if decision.limited:
            attempt.limited_s += decision.delay_s
            if self._options.concurrency is None:
                self._limit = limit_after_refusal(self._limit)
        if decision.waiting is Waiting.NOTHING or decision.limited:
            heappush(self._delayed, (again_s, next(self._order), attempt))
        else:
            model.ready.appendleft(attempt)

    def _finish(self, attempt: _Attempt, answer: Answer, wrong: str | None, *, poison: bool) -> None:
        line, refusal = attempt.line, answer.refusal
        id_ = f"{self._id_prefix}_{line.number}"
        if poison and refusal is not None:
            written = error_line(id_, line.custom_id, "server_crashed", refusal.message)
        elif answer.status and answer.body:
            error = None if wrong is None else ("schema_mismatch", wrong)
            written = answer_line(id_, line.custom_id, answer.status, answer.request_id, answer.body, error)
        else:
            message = "" if refusal is None else refusal.message
            written = error_line(id_, line.custom_id, "no_answer", message)
        is_done = refusal is None and wrong is None
        self._block.add(written, monotonic())
        self._block.set_state(line.number, LineState.DONE if is_done else LineState.FAILED)
        progress = self.progress
        progress.ended_here += 1
        progress.done += is_done
        progress.failed += not is_done
        if refusal is None:
            tokens = tokens_of(answer.body)
            progress.tokens_prompt += tokens.prompt
            progress.tokens_cached += tokens.cached
            progress.tokens_completion += tokens.completion

    def _note_trouble(self, refusal: Refusal | None, now_s: float) -> None:
        """Note trouble. Other clients that use the server are no trouble: a batch waits as long as they use
        it.
        """
        is_trouble = refusal is not None and (
            refusal.status == 0 or (refusal.status == 503 and not refusal.cause.startswith("batch_"))
        )
        if not is_trouble:
            self._trouble_since_s = None
        elif self._trouble_since_s is None:
            self._trouble_since_s = now_s
        self._trouble = refusal.message if refusal is not None else ""

    def _check_patience(self, now_s: float) -> None:
        if self._trouble_since_s is None or now_s - self._trouble_since_s < self._options.patience_s:
            return
        raise BatchStopped(
            f"No line has been served for {self._options.patience_s:g} s: {self._trouble}.",
            remedy="See `llamasup status`. Run the same command again: it continues.",
        )

    async def _say_why_it_waits(self) -> None:
        """Report the progress, and keep the reason in the index, where ``llamasup batch status`` reads it."""
        progress, window, waiting = self.progress, self._options.only_between, ""
        if window is not None and progress.state != "running":
            waiting = f"its hours begin at {window.begin:%H:%M}"
        elif self._trouble_since_s is not None and (progress.waiting or not self._in_flight):
            waiting = printable(self._trouble[:_REASON_CHARACTERS])
        if waiting != self._told:
            progress.waiting = self._told = waiting
            await in_thread(partial(self._index.set_fact, "waiting", waiting))
        self.progress.in_flight = len(self._in_flight)
        if self._on_progress is not None:
            self._on_progress(self.progress)
