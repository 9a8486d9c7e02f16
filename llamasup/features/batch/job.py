"""A batch of files on this machine: its files, the process that runs it, and one run of it.

Next to the output ``OUT`` are its index ``OUT.index`` and a lock file. A small file in the state folder lists
the batch for ``llamasup batch list``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import msgspec
from msgspec import Struct

from llamasup.core.system.native import native
from llamasup.core.system.storage.folders import (
    Claimed,
    atomic_write,
    claim_file,
    open_private,
    private_folder,
    read_bounded,
    state_folder,
)
from llamasup.core.system.text import INVALID_JSON
from llamasup.errors import (
    Conflict,
    FolderUnusable,
    LlamasupError,
    OutputFailed,
    RequestUnknown,
    UsageInvalid,
)
from llamasup.features.batch.client import BatchClient
from llamasup.features.batch.engine import BatchRun, EngineOptions, Progress
from llamasup.features.batch.index import BatchInvalid, Counts, Index, in_thread
from llamasup.features.batch.lines import PromptTemplate, TemplateInvalid, template_of
from llamasup.features.batch.output import Output
from llamasup.features.batch.schedule import Window, read_window

CANCEL_WAIT_S: Final = 120.0
"""A run that started a llamasup stops it first."""
_FOLDER: Final = "batches"
_POLL_S: Final = 0.05
_OWNER_BYTES: Final = 200


class Job(Struct, frozen=True):
    """The options of a run, kept so that ``resume`` can repeat it. All paths are absolute.

    ``template``: the text of the template file; empty: the usual one; None: the lines are requests.
    """

    id: str
    input: str
    output: str
    endpoint: str = "/v1/chat/completions"
    template: str | None = None
    model: str | None = None
    arguments: tuple[str, ...] = ()
    url: str | None = None
    pid: int | None = None
    api_key_file: str | None = None
    only_between: str | None = None
    concurrency: int | None = None
    created: str = ""

    @property
    def index_path(self) -> Path:
        return Path(f"{self.output}.index")

    @property
    def lock_path(self) -> Path:
        return Path(f"{self.output}.index-lock")

    @property
    def prompt_template(self) -> PromptTemplate | None:
        """Raises UsageInvalid."""
        if self.template is None:
            return None
        try:
            return template_of(self.template or None, self.endpoint)
        except TemplateInvalid as error:
            raise UsageInvalid(
                f"--template: {error}.", remedy='Write a body such as {"prompt": "Say: $text"}.'
            ) from None

    @property
    def window(self) -> Window | None:
        """Raises UsageInvalid."""
        if self.only_between is None:
            return None
        try:
            return read_window(self.only_between)
        except ValueError as error:
            raise UsageInvalid(f"--only-between: {error}.", remedy="Write it as 22:00-07:00.") from None

    @property
    def reading(self) -> str:
        """A fingerprint of the options that change how a line is read."""
        return blake2b(f"{self.endpoint}\0{self.template!r}".encode(), digest_size=8).hexdigest()


def job_of(source: Path, output: Path, **options: Any) -> Job:
    """Return the batch that writes to this output. Raises UsageInvalid."""
    try:
        source_path, output_path = source.resolve(strict=True), output.resolve()
    except OSError as error:
        raise UsageInvalid(
            f"The input {str(source)!r} cannot be read: {error.strerror}.", remedy="Check the path."
        ) from None
    if not source_path.is_file():
        raise UsageInvalid(
            f"The input {str(source)!r} is not a regular file.",
            remedy="Write it to a file: a batch reads its lines again when it continues.",
        )
    if source_path == output_path:
        raise UsageInvalid("The input and the output are the same file.", remedy="Give another -o.")
    if output_path.exists() and not output_path.is_file():
        raise UsageInvalid(
            f"The output {str(output)!r} is not a regular file.",
            remedy="Give a path to a new file with -o.",
        )
    id_ = "batch_" + blake2b(os.fsencode(output_path), digest_size=6).hexdigest()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    job = Job(id_, str(source_path), str(output_path), created=created, **options)
    _ = job.window, job.prompt_template  # refused here, before there is a file
    return job


# --- the process that runs a batch


@contextmanager
def locked(job: Job) -> Iterator[None]:
    """Run the batch: only one process does. Its PID and start are in the lock file. Raises Conflict."""
    with _claimed(job) as fd:
        os.write(fd, f"{os.getpid()} {native.start_of(os.getpid())}".encode())
        try:
            yield
        finally:
            os.ftruncate(fd, 0)


@contextmanager
def _claimed(job: Job) -> Iterator[int]:
    """The empty lock file, while no other process has it. Raises Conflict."""
    fds: list[int] = []
    try:
        try:
            lock = claim_file(job.lock_path)
            if lock is not None:
                fds.append(lock)
            elif runner_of(job) is not None:  # files cannot be locked here
                raise Claimed(job.lock_path)  # noqa: TRY301
            fds.append(open_private(job.lock_path, os.O_RDWR | os.O_CREAT))
            os.ftruncate(fds[-1], 0)
        except Claimed:
            raise Conflict(
                f"Another process already runs the batch with the output {job.output!r}.",
                remedy=f"Wait for it, or stop it: llamasup batch cancel {job.id}",
            ) from None
        except OSError as error:
            raise OutputFailed(
                f"{str(job.lock_path)!r} cannot be written: {error.strerror}.",
                remedy="Make its folder writable, or choose another output (-o).",
            ) from None
        yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


def runner_of(job: Job) -> int | None:
    """Return the PID of the process that runs it. One that was killed has left its PID, but its start
    differs.
    """
    try:
        owner, _ = read_bounded(job.lock_path, _OWNER_BYTES)
    except OSError:
        return None
    pid, _, start = owner.decode("ascii", "replace").partition(" ")
    return int(pid) if pid.isdecimal() and native.start_of(int(pid)) == start else None


def cancel(job: Job, wait_s: float = CANCEL_WAIT_S) -> bool:
    """End the process that runs the batch, and wait until it has exited. Returns whether there was one.

    The finished lines stay. Raises Conflict if the process does not end within ``wait_s``.
    """
    ended: int | None = None
    deadline_s = monotonic() + wait_s
    while True:
        pid = runner_of(job)
        if pid is not None and pid != ended:
            ended = pid
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        with suppress(Conflict), _claimed(job), Index(job.index_path) as index:
            index.set_fact("cancelled", 1)
            return ended is not None
        if monotonic() >= deadline_s:
            raise Conflict(
                f"The process {pid}, which runs the batch, has not exited after {wait_s:g} s.",
                remedy="Try again, or kill it: the finished lines are in the output.",
            )
        sleep(_POLL_S)


# --- one run


class Prepared(Struct, frozen=True):
    """The open files of a batch, all lines checked. ``source`` is a descriptor of the input."""

    job: Job
    index: Index
    output: Output
    source: int

    async def check_models(
        self, client: BatchClient, on_wait: Callable[[str], object] = lambda reason: None
    ) -> None:
        """Raises BatchInvalid if the server does not serve a model that a line names, and NotRunning if it
        does not answer for a minute. ``on_wait`` gets the reason of each wait.
        """

        async def wait(reason: str) -> None:
            on_wait(reason)
            await in_thread(partial(self.index.set_fact, "waiting", reason))

        named = await in_thread(self.index.models)
        unknown = await client.unknown_models([model for model, _, _ in named if model], on_wait=wait)
        if unknown:
            raise BatchInvalid(
                "The input names models that the server does not serve.",
                remedy="Correct the names; `llamasup list` and /v1/models show the models.",
                details=tuple(
                    f"line {first} ({count} lines): {unknown[model]}"
                    for model, first, count in named
                    if model in unknown
                ),
            )

    def run(
        self,
        client: BatchClient,
        options: EngineOptions,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> BatchRun:
        return BatchRun(
            self.index,
            self.output,
            self.source,
            client,
            options,
            template=self.job.prompt_template,
            on_progress=on_progress,
        )


@contextmanager
def prepare(
    job: Job,
    on_reading: Callable[[int, int], None] | None = None,
    *,
    most_lines: int | None = None,
    only_url: str | None = None,
) -> Iterator[Prepared]:
    """Open the files, check all lines, and take over what the output has. Blocks. Use it inside ``locked``.

    ``only_url``: that of all lines.
    ``on_reading`` gets the bytes read and their total. Raises BatchInvalid, InputChanged, OutputFailed.
    """
    template = job.prompt_template
    with ExitStack() as opened:
        index = opened.enter_context(Index(job.index_path))
        try:
            source = os.open(job.input, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise UsageInvalid(
                f"The input {job.input!r} cannot be read: {error.strerror}.", remedy="Check its permissions."
            ) from None
        opened.callback(os.close, source)
        status = os.fstat(source)
        version = f"{status.st_ino}/{status.st_size}/{status.st_mtime_ns}/{job.reading}"
        if index.fact("input") != version:
            with open(source, "rb", closefd=False, buffering=1 << 20) as file:

                def report(read: int) -> None:
                    if on_reading is not None:
                        on_reading(read, status.st_size)

                index.read_input(
                    file, template=template, most_lines=most_lines, only_url=only_url, on_progress=report
                )
            index.set_fact("input", version)
        output = opened.enter_context(closing(Output(Path(job.output))))
        output.settle(index)
        yield Prepared(job, index, output, source)


# --- the list of batches


def _folder() -> Path:
    return private_folder(state_folder() / _FOLDER)


def register(job: Job) -> None:
    """List the batch. Raises FolderUnusable."""
    folder = _folder()
    try:
        atomic_write(folder / f"{job.id}.json", msgspec.json.encode(job))
    except OSError as error:
        raise FolderUnusable(
            f"The list of batches in {str(folder)!r} cannot be written: {error.strerror}.",
            remedy="Make the folder writable, or free some space.",
        ) from None


def jobs() -> Sequence[Job]:
    """Return the batches of this user, the newest first, as long as their index exists."""
    found: list[Job] = []
    with suppress(OSError):
        for path in _folder().glob("batch_*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Job))
            except (OSError, *INVALID_JSON):
                continue
    return sorted(
        (job for job in found if job.index_path.exists()), key=lambda job: job.created, reverse=True
    )


def find_job(name: str) -> Job:
    """Return the batch with this id, or with this output. Raises RequestUnknown."""
    path = str(Path(name).expanduser().resolve())
    for job in jobs():
        if name == job.id or path == job.output:
            return job
    raise RequestUnknown(
        f"There is no batch {name!r}.", remedy="`llamasup batch list` shows the batches and their ids."
    )


def status_of(job: Job) -> Mapping[str, Any]:
    """Return the status of a batch. ``state`` is running, completed, cancelled, stopped, or unreadable (its
    index is damaged). ``waiting``: why no line runs now.
    """
    counts, is_cancelled, is_readable, waiting = Counts(), False, True, None
    try:
        with Index(job.index_path, readonly=True) as index:
            counts = index.counts()
            is_cancelled = bool(index.fact("cancelled"))
            waiting = index.fact("waiting") or None
    except LlamasupError:
        is_readable = False
    state = "stopped"
    if runner_of(job) is not None:
        state = "running"
    elif not is_readable:
        state = "unreadable"
    elif counts.total and not counts.left:
        state = "completed"
    elif is_cancelled:
        state = "cancelled"
    return {
        "id": job.id,
        "state": state,
        "input": job.input,
        "output": job.output,
        "created": job.created,
        "total": counts.total,
        "done": counts.done,
        "failed": counts.failed,
        "aside": counts.aside,
        "waiting": waiting if state == "running" else None,
    }
