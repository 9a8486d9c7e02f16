"""Runs the requests of a file, and shows, ends and continues such runs (``llamasup batch …``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import error_event, guarded, show_error
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View, duration_text, plural
from llamasup.errors import LlamasupError, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.batch_view import BatchLines
    from llamasup.features.batch.engine import Progress
    from llamasup.features.batch.job import Job, Prepared

commands = command_set(
    "batch",
    "Run the requests of a file, and continue after interruptions.\n\n"
    "A batch uses the models only while no other client does.",
)

Input = Annotated[Path, argument("IN.jsonl", "The requests, one JSON object per line.")]
OutputFile = Annotated[Path, option("--output -o", "OUT.jsonl", "The file for the answers.")]
ModelToRun = Annotated[
    str | None,
    option(
        "--model",
        "MODEL",
        "Start llamasup with this model for the run. Options of `llamasup run` may follow --.",
    ),
]
Arguments = Annotated[list[str] | None, argument("[-- OPTIONS]", "Options of `llamasup run`, with --model.")]
Template = Annotated[
    str | None,
    option(
        "--template",
        "FILE",
        "The lines are prompts: strings, or objects with fields. FILE has the JSON body of each request. "
        "The line replaces $prompt in it, or a field replaces $FIELD. `default` sends only the prompt.",
    ),
]
Endpoint = Annotated[str, option("--endpoint", "PATH", "The path for the requests of --template.")]
OnlyBetween = Annotated[
    str | None, option("--only-between", "HH:MM-HH:MM", "Start requests only in these hours.")
]
Concurrency = Annotated[
    int | None,
    option(
        "--concurrency",
        "N",
        "Requests in flight. Default: as many as the models can use.",
        read=partial(whole_number, minimum=1, maximum=1024),
    ),
]
Name = Annotated[str, argument("BATCH", "The id of the batch, or its output file.")]


@commands.command()
@guarded
def run(
    view: View,
    source: Input,
    arguments: Arguments = None,
    *,
    output: OutputFile,
    model: ModelToRun = None,
    template: Template = None,
    endpoint: Endpoint = "/v1/chat/completions",
    pid: o.UsedPid = None,
    url: o.UsedUrl = None,
    api_key_file: o.UsedKeyFile = None,
    only_between: OnlyBetween = None,
    concurrency: Concurrency = None,
    json: o.Json = False,
) -> int:
    """Send each line of a file, and append each answer to another file.

    Repeat the command to continue an interrupted run. The exit code is 0 when each line has its answer or
    its error.
    """

    def job() -> Job:
        from llamasup.cli.target import URL_VARIABLE, full_url
        from llamasup.features.batch.job import job_of
        from llamasup.features.batch.lines import URLS

        if model is not None and (pid is not None or url is not None or api_key_file is not None):
            raise UsageInvalid(
                "--model starts a llamasup, and --pid, --url and --api-key-file name one.",
                remedy="Leave --model out, or the others.",
            )
        if pid is not None and url is not None:
            raise UsageInvalid("--pid and --url exclude each other.", remedy="Leave one of them out.")
        if arguments and model is None:
            raise UsageInvalid("Options after -- need --model.", remedy="Leave them out, or give --model.")
        if endpoint not in URLS:
            raise UsageInvalid(
                f"--endpoint {endpoint!r} cannot be used in a batch.", remedy=f"Use one of {', '.join(URLS)}."
            )
        address = url or (None if model or pid else os.environ.get(URL_VARIABLE) or None)
        return job_of(
            source,
            output,
            endpoint=endpoint,
            template=_template_text(template),
            model=model,
            arguments=tuple(arguments or ()),
            url=None if address is None else full_url(address),
            pid=pid,
            api_key_file=None if api_key_file is None else str(api_key_file.resolve()),
            only_between=only_between,
            concurrency=concurrency,
        )

    return _run(view, job, json=json)


@commands.command("list")
@guarded
def list_(view: View, json: o.Json = False) -> None:
    """List the batches of your user."""
    from llamasup.features.batch.job import jobs, status_of

    rows = [status_of(job) for job in jobs()]
    if json:
        write_json({"batches": rows})
    elif rows:
        columns = ("id", "state", "done", "failed", "total", "output")
        cells = [tuple(str(row[name]) for name in columns) for row in rows]
        write_result(table([("BATCH", "STATE", "DONE", "FAILED", "LINES", "OUTPUT"), *cells], indent=""))
    else:
        view.say("info", "batch", "There are no batches yet.")


@commands.command()
@guarded
def status(view: View, name: Name, json: o.Json = False) -> None:
    """Show how far a batch is."""
    from llamasup.features.batch.job import find_job, status_of

    found = status_of(find_job(name))
    if json:
        write_json(found)
        return
    over = found["done"] + found["failed"]
    state = found["state"] + (f", waiting ({found['waiting']})" if found["waiting"] else "")
    write_result(
        f"{found['id']} {state}: {over} of {plural(found['total'], 'line')},"
        f" {found['failed']} failed\n  input   {found['input']}\n  output  {found['output']}"
    )


@commands.command()
@guarded
def cancel(view: View, name: Name) -> None:
    """Stop the run of a batch. Its answers so far stay, and `resume` continues it."""
    from llamasup.features.batch import job as batch_job

    job = batch_job.find_job(name)
    was_running = batch_job.cancel(job)
    view.say("info", "batch", f"{job.id}: {'ended' if was_running else 'it was not running'}.")


@commands.command()
@guarded
def resume(view: View, name: Name, json: o.Json = False) -> int:
    """Continue a batch with the options of its first run."""
    from llamasup.features.batch.job import find_job

    return _run(view, lambda: find_job(name), json=json)


def _template_text(given: str | None) -> str | None:
    """Read the template file; empty for the usual template."""
    if given is None or given == "default":
        return None if given is None else ""
    try:
        return Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageInvalid(
            f"The template {given!r} cannot be read: {reason}.", remedy="Check the path of --template."
        ) from None


def _run(view: View, named: Callable[[], Job], *, json: bool) -> int:
    """Run the batch that ``named`` returns. Errors of ``named`` and of the run are shown."""
    from llamasup.cli.interruptible import interruptible
    from llamasup.cli.output.batch_view import BatchBar, BatchEvents, BatchLines, progress_fields
    from llamasup.features.batch import job as batch_job

    shown: BatchLines = (
        BatchEvents(view) if json else BatchBar(view) if sys.stderr.isatty() else BatchLines(view)
    )
    try:
        with closing(shown):
            job = named()
            with batch_job.locked(job):
                batch_job.register(job)  # before the reading, which may take long and can be cancelled
                with batch_job.prepare(job, shown.reading) as prepared:
                    prepared.index.set_fact("cancelled", 0)
                    is_left = prepared.index.counts().left > 0
                    progress = interruptible(_serve(job, prepared, shown)) if is_left else None
                    counts = prepared.index.counts()
    except LlamasupError as error:
        if isinstance(shown, BatchEvents):
            shown.event("error", **error_event(error))
        return show_error(view, error)
    if isinstance(shown, BatchEvents):
        fields = {} if progress is None else progress_fields(*progress)
        fields |= {"state": "completed", "total": counts.total, "done": counts.done, "failed": counts.failed}
        shown.event("done", id=job.id, output=job.output, **fields)
    else:
        view.say("info", "batch", _summary(job, counts.done, counts.failed, progress))
    return 0


def _summary(job: Job, done: int, failed: int, progress: tuple[Progress, float] | None) -> str:
    text = f"{plural(done, 'answer')} and {plural(failed, 'error')} in {job.output}"
    if progress is None:
        return f"{text}; nothing was left to do"
    ran, now_s = progress
    back = f"; {ran.put_back} requests gave way to other clients" if ran.put_back else ""
    return (
        f"{text}; {plural(ran.ended_here, 'line')} in {duration_text(now_s - ran.began_s)},"
        f" {ran.rates(now_s)[0]:.0f} tokens/s{back}"
    )


async def _serve(job: Job, prepared: Prepared, shown: BatchLines) -> tuple[Progress, float]:
    """Run the lines that are left, on a running llamasup or on one that starts for them."""
    import time

    from llamasup.cli.batch_server import server_of
    from llamasup.features.batch.client import BatchClient
    from llamasup.features.batch.engine import EngineOptions

    async with server_of(job) as (url, api_key):
        client = BatchClient(url, api_key=api_key)
        try:
            await prepared.check_models(client, shown.waits)
            options = EngineOptions(job.concurrency, only_between=job.window)
            engine = prepared.run(client, options, shown.moved)
            await engine.run()
            return engine.progress, time.monotonic()
        finally:
            await client.aclose()
