"""Shows, writes and checks the settings of a client (``connect``), and runs a client (``launch``)."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamasup.cli.command_group import Command, argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.target import client_address
from llamasup.errors import ClientMissing, ConfigInvalid, OutputFailed, UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.output.view import View
    from llamasup.features.connect.check import Warned
    from llamasup.features.connect.clients import Client, Connection, Settings

commands = command_set()

_MAX_BYTES = 1 << 20  # of a settings file; an editor's has some kilobytes
_MAX_LISTED = 10
_STOP_S = 10.0  # for a client that was asked to exit
_DASHES = "connect.after_dashes"
_BY_HAND = "Add the settings by hand; the command shows them without --write."

ClientName = Annotated[
    str | None, argument("CLIENT", "The client. Without it, the command lists the clients.")
]
Model = Annotated[str | None, option("--model", "NAME", "The model. Default: the only one.")]
Write = Annotated[bool, flag("--write", "Write the settings file, after showing the difference.")]
Check = Annotated[bool, flag("--check", "Send one request as the client does, and show what comes back.")]
File = Annotated[Path | None, option("--file", "PATH", "The settings file. Default: that of the client.")]
Url = Annotated[
    str | None, option("--url", "URL", "The address for the client. Default: that of the running one.")
]
Pid = Annotated[
    int | None, option("--pid", "PID", "Process ID of the llamasup to connect to, if several run.")
]
ApiKeyFile = Annotated[
    Path | None,
    option("--api-key-file", "PATH", "File with only the key that the client sends. Env: $LLAMASUP_API_KEY."),
]


@commands.command()
@guarded
def connect(
    view: View,
    client: ClientName = None,
    *,
    model: Model = None,
    write: Write = False,
    check: Check = False,
    file: File = None,
    url: Url = None,
    pid: Pid = None,
    api_key_file: ApiKeyFile = None,
    json: o.Json = False,
) -> None:
    """Show the settings of a client for a running llamasup.

    With --write, the command changes the settings file of the client, and keeps the file before.
    """
    from llamasup.features.connect.check import context_warning
    from llamasup.features.connect.clients import CLIENTS
    from llamasup.features.connect.connection import connection_to, key_from, with_catalog

    if client is None:
        _list(CLIENTS, json=json)
        return
    name, chosen = _client(CLIENTS, client)
    if check and (write or file is not None):
        raise UsageInvalid(
            "--check changes no file.", remedy="Leave out --write and --file, or run both commands."
        )
    if chosen.file is None and (write or file is not None):
        raise UsageInvalid(
            f"{chosen.title} has no settings file that other programs may write.",
            remedy=f"See what to enter: llamasup connect {client}",
        )
    connection = connection_to(client_address(pid=pid, url=url)[0], model, key_from(api_key_file))
    warning = context_warning(chosen, connection)
    if check:
        _check(chosen, name, connection, warning, json=json)
        _warn(view, warning)
        return
    settings = chosen.settings(connection)
    path = None if chosen.file is None else file or _path_of(chosen)
    backup = None
    if write and path is not None:
        settings = with_catalog(chosen, settings, connection, path.parent)
        backup = _write(view, path, chosen, settings, connection.key, show=not json)
    if json:
        write_json(
            {
                "client": name,
                "file": None if path is None else str(path),
                "settings": settings.values,
                "environment": settings.environment,
                "steps": settings.steps,
                "backup": None if backup is None else str(backup),
                "warnings": _as_json(warning),
            }
        )
    else:
        _show(chosen, settings, None if write else path)
    _warn(view, warning)


def _list(clients: Mapping[str, Client], *, json: bool) -> None:
    if json:
        write_json({"clients": [{"name": name, "title": client.title} for name, client in clients.items()]})
    else:
        rows = [(name, client.title) for name, client in clients.items()]
        width = max(len(name) for name, _ in rows)
        write_result("\n".join(f"{name:{width}}  {title}" for name, title in rows))


def _client(clients: Mapping[str, Client], name: str) -> tuple[str, Client]:
    from llamasup.core.system.text import did_you_mean
    from llamasup.features.connect.clients import ALIASES

    name = ALIASES.get(name, name)
    if name not in clients:
        similar = did_you_mean(name, clients)
        raise UsageInvalid(
            f"There are no settings for the client {name!r}.",
            remedy=f"{similar[0].upper()}{similar[1:]}" if similar else f"Known: {', '.join(clients)}.",
        )
    return name, clients[name]


def _warn(view: View, warning: Warned | None) -> None:
    if warning is not None:
        view.say("warning", "connect", f"{warning.message}\n  → {warning.remedy}")


def _as_json(warning: Warned | None) -> list[dict[str, str]]:
    return [] if warning is None else [{"message": warning.message, "remedy": warning.remedy}]


# --- the settings file -------------------------------------------------------------------------------


def _path_of(client: Client) -> Path:
    folder = os.environ.get(client.folder_variable) if client.folder_variable else None
    return (Path(folder) if folder else Path.home() / client.folder) / (client.file or "")


def _write(
    view: View, path: Path, client: Client, settings: Settings, key: str, *, show: bool
) -> Path | None:
    """Change the file; returns its backup, if the file existed and changes."""
    from llamasup.core.system.native import native
    from llamasup.core.system.storage.folders import atomic_write, read_bounded
    from llamasup.features.connect.merge import CannotMerge, difference, has_key, merged

    try:
        path = path.expanduser()
    except RuntimeError:
        raise _unwritable(path, OSError("the user after ~ does not exist")) from None
    target = path.resolve()  # a link, such as one to a repository of settings, stays
    before, mode, is_open = b"", 0o600, False
    try:
        if target.exists():
            before, status = read_bounded(target, _MAX_BYTES + 1)
            mode, is_open = status.st_mode & 0o777, native.is_open_to_others(status)
    except OSError as error:
        raise _unwritable(path, error) from None
    if len(before) > _MAX_BYTES:
        raise _unchanged(path, f"it has more than {_MAX_BYTES >> 20} MiB")
    try:
        text = before.decode("utf-8-sig")
        after = merged(text, settings.values, client.format)
    except UnicodeDecodeError:
        raise _unchanged(path, "it is not UTF-8") from None
    except CannotMerge as error:
        raise _unchanged(path, str(error)) from None
    closed = mode & 0o700 if is_open and has_key(after, key) else mode
    backup = None
    if show and after != text:
        write_result(difference(text, after, str(path), key).rstrip("\n"))
    try:
        if after != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            backup = _backup(target, before, closed) if before else None  # it may have an earlier key
            atomic_write(target, after.encode(), mode=closed)
        elif closed != mode:
            target.chmod(closed)
    except OSError as error:
        raise _unwritable(path, error) from None
    view.say("info", "connect", f"{path} has these settings already." if after == text else f"Wrote {path}")
    if backup is not None:
        view.say("info", "connect", f"  → The file before is {backup}")
    if closed != mode:
        what = (
            f"  → Only you can access it now, because it has the key (mode {closed:04o}, before {mode:04o})"
        )
        view.say("info", "connect", what)
    return backup


def _backup(path: Path, content: bytes, mode: int) -> Path:
    """Write a copy under a new name."""
    number = 0
    while True:
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return backup


def _unchanged(path: Path, why: str) -> ConfigInvalid:
    return ConfigInvalid(f"{str(path)!r} is not changed: {why}.", remedy=_BY_HAND)


def _unwritable(path: Path, error: OSError) -> OutputFailed:
    return OutputFailed(
        f"{str(path)!r} cannot be written: {error.strerror or error}.",
        remedy=_BY_HAND,
    )


def _show(client: Client, settings: Settings, path: Path | None) -> None:
    from llamasup.features.connect.merge import rendered

    parts = []
    if path is not None and settings.values:
        parts.append(f"# {client.title}: add this to {path}\n{rendered(settings.values, client.format)}")
    if settings.environment:
        exports = "\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in settings.environment.items()
        )
        parts.append(f"# {client.title}: set these variables\n{exports}\n")
    if settings.steps:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(settings.steps, 1))
        parts.append(f"# {client.title}\n{steps}\n")
    if parts:
        write_result("\n".join(parts).rstrip("\n"))


# --- one request as the client sends it --------------------------------------------------------------


def _check(client: Client, name: str, to: Connection, warning: Warned | None, *, json: bool) -> None:
    from llamasup.features.connect.check import PATHS
    from llamasup.features.connect.connection import exchange

    reply, first_s = exchange(client, to)
    if json:
        answer = {"text": reply.text, "tool_call": reply.tool_call, "first_token_s": first_s}
        tokens = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
        about = {"client": name, "path": PATHS[client.api], "model": to.model, "context": to.context}
        write_json({**about, **answer, **tokens, "warnings": _as_json(warning)})
        return
    said = f"a call of the tool {reply.tool_call!r}" if reply.tool_call else f"text, {reply.text!r}"
    cached = "not reported" if reply.cached_tokens is None else str(reply.cached_tokens)
    rows = (
        ("answer", said if reply.has_begun else "empty: the model ended it at once"),
        ("first token", "none" if first_s is None else f"after {first_s:.2f} s"),
        ("prompt", f"{reply.prompt_tokens} tokens, from the cache: {cached}"),
        ("context", "not reported" if to.context is None else f"{to.context:,} tokens for one request"),
    )
    title = f"{client.title}: POST {PATHS[client.api]} at {to.url}, model {to.model!r}"
    write_result("\n".join((title, *(f"  {word:12} {value}" for word, value in rows))))


# --- launch --------------------------------------------------------------------------------------------


class _WithArguments(Command):
    """Keeps the arguments after ``--`` for the client: MODEL before them is optional."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_DASHES] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@commands.command(cls=_WithArguments)
@guarded
def launch(
    view: View,
    ctx: typer.Context,
    client: Annotated[str, argument("CLIENT", "A client with a command, such as claude, codex or opencode.")],
    model: Annotated[str | None, argument("MODEL", "The model, as for run. Default: the only one.")] = None,
    arguments: Annotated[list[str] | None, argument("[-- ARGUMENTS]", "Passed on to the client.")] = None,
    *,
    ctx_size: Annotated[
        str | None, option("--ctx-size", "TOKENS", "Context size of a model that the command starts.")
    ] = None,
    url: Url = None,
    pid: Pid = None,
    api_key_file: ApiKeyFile = None,
) -> int:
    """Run an agent with a model, and leave nothing behind.

    The command uses a running llamasup that serves the model, or starts one until the client exits. The
    settings are for this process of the client only.
    """
    from llamasup.cli.interruptible import interruptible
    from llamasup.features.connect.clients import CLIENTS
    from llamasup.features.connect.connection import key_from, running_with

    name, chosen = _client(CLIENTS, client)
    if not chosen.program:
        raise UsageInvalid(
            f"{chosen.title} has no command that llamasup could run.",
            remedy=f"See its settings: llamasup connect {name}",
        )
    if arguments:
        raise UsageInvalid(
            f"Unexpected argument {arguments[0]!r}.", remedy="Put the arguments of the client after --."
        )
    program = shutil.which(chosen.program)
    if program is None:
        raise ClientMissing(
            f"The command {chosen.program!r} of {chosen.title} is not on PATH.",
            remedy=f"Install it: {chosen.install}",
        )
    found = client_address(pid=pid, url=url)[0] if url is not None or pid is not None else running_with(model)
    if found is None:
        assert model is not None
        _fetch(view, model)
    run = ("--profile", "latency", *(() if ctx_size is None else ("--ctx-size", ctx_size)))
    run = run if api_key_file is None else (*run, "--api-key-file", str(api_key_file))
    session = _Session(view, chosen, program, tuple(ctx.meta[_DASHES]), key_from(api_key_file))
    return interruptible(session.run(found, model, run))


def _fetch(view: View, model: str) -> None:
    """Download the model first, with a progress that the llamasup in the background could not show."""
    from llamasup.core.hub.reference import is_reference
    from llamasup.core.models.by_name import file_of
    from llamasup.features import attached

    path = file_of(model)
    if is_reference(path):
        for fetch_missing in attached("fetch_missing"):
            fetch_missing(path, view)


class _Session:
    """One run of a client, with what the command has started for it."""

    def __init__(self, view: View, client: Client, program: str, given: tuple[str, ...], key: str) -> None:
        self._view = view
        self._client = client
        self._program = program
        self._given = given
        self._key = key
        self._runs = False  # the client has the terminal
        self._troubles: list[str] = []  # of llamasup, while the client had the terminal

    async def run(self, url: str | None, model: str | None, arguments: tuple[str, ...]) -> int:
        """Run the client with the llamasup at ``url``, or with a new one. Returns the exit code."""
        import asyncio  # here, as --help does without it

        from llamasup.cli.started_server import started_server
        from llamasup.core.system.process.guardian import guarded_run_folder
        from llamasup.core.system.process.run_folder import NO_CONTROL
        from llamasup.features.connect.connection import connection_to

        with guarded_run_folder() as (folder, guardian):
            (folder / NO_CONTROL).touch()
            await asyncio.to_thread(guardian.wait_until_started)
            async with AsyncExitStack() as stack:
                if url is None:
                    assert model is not None
                    self._view.show_activity(f"starting {model}")
                    try:
                        started = started_server(model, arguments, on_event=self._on_event, run_folder=folder)
                        url, model = await stack.enter_async_context(started), None
                    finally:
                        self._view.show_activity(None)
                connection = await asyncio.to_thread(connection_to, url, model, self._key)
                code = await self._run_client(folder, connection)
            for trouble in self._troubles[-_MAX_LISTED:]:
                self._view.say("warning", "launch", trouble)
            return code

    async def _run_client(self, folder: Path, to: Connection) -> int:
        import asyncio

        from llamasup.cli.interruptible import signals_to
        from llamasup.core.system.process.sweep import end_descendants, tag_environment
        from llamasup.features.connect.check import context_warning

        _warn(self._view, context_warning(self._client, to))
        words, environment = await asyncio.to_thread(self._overrides, folder, to)
        environment = tag_environment({**os.environ, **environment}, folder)
        self._runs = True
        try:
            process = await asyncio.create_subprocess_exec(self._program, *words, env=environment)
        except OSError as error:
            raise ClientMissing(
                f"{self._program!r} cannot be executed: {error.strerror or error}.",
                remedy=f"Install {self._client.title} again: {self._client.install}",
            ) from None
        loop = asyncio.get_running_loop()

        def on_signal(name: str) -> None:
            """Leave Ctrl-C to the client, which gets it from the terminal. Other signals end both."""
            if name != "SIGINT" and process.returncode is None:
                process.send_signal(getattr(signal, name, signal.SIGTERM))
                loop.call_later(_STOP_S, kill)

        def kill() -> None:
            if process.returncode is None:
                process.kill()

        def deliver(name: str) -> None:
            loop.call_soon_threadsafe(on_signal, name)

        with signals_to(deliver):
            code = await process.wait()
        self._runs = False
        if code < 0:  # not after a normal exit: what the user has started in the background may stay
            await asyncio.to_thread(end_descendants, environment)
        return code if code >= 0 else 128 - code

    def _overrides(self, folder: Path, to: Connection) -> tuple[Sequence[str], Mapping[str, str]]:
        from llamasup.core.system.storage.folders import atomic_write
        from llamasup.features.connect.connection import with_catalog
        from llamasup.features.connect.merge import CannotMerge
        from llamasup.features.connect.overrides import overrides

        client, own = self._client, ""
        path = folder / Path(client.file or "").name
        if client.file_variable or (client.file_option and client.inline is None):
            own = _text_of(_path_of(client))
        try:
            settings = with_catalog(client, client.settings(to), to, folder)
            made = overrides(client, settings, self._given, path, own)
        except CannotMerge as error:
            raise _unusable(_path_of(client), str(error)) from None
        if made.file_content is not None:
            atomic_write(path, made.file_content.encode(), mode=0o600)
        return made.arguments, made.environment

    def _on_event(self, event: Mapping[str, Any]) -> None:
        """Show the progress of the start; later keep what the user should know."""
        if self._runs:
            if event["event"] in ("exit", "failed"):
                self._troubles.append(f"While the client ran: {event['message']}")
            elif event["event"] == "ended":
                self._troubles.append("While the client ran: llamasup ended.")
        elif event["event"] == "progress":
            percent = "" if event.get("percent") is None else f" {event['percent']:.0f} %"
            self._view.show_activity(f"loading {event['model']}{percent}")
        elif event["event"] == "warning":
            self._view.say("warning", "launch", f"{event['message']}\n  → {event['remedy']}")


def _text_of(path: Path) -> str:
    from llamasup.core.system.storage.folders import read_bounded

    try:
        return read_bounded(path, _MAX_BYTES)[0].decode("utf-8-sig")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, getattr(error, "strerror", None) or "it is not UTF-8") from None


def _unusable(path: Path, why: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"The settings in {str(path)!r} cannot be used: {why}.",
        remedy="Correct the file. `launch` adds the model to a copy of it.",
    )
