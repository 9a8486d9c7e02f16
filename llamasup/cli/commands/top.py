"""Shows the models and the requests of a running llamasup, live in the terminal (``llamasup top``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.output.layout import stdout_columns
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.status_table import models_table
from llamasup.cli.output.top_screen import (
    Cancel,
    Line,
    Quit,
    Screen,
    log_lines,
    press,
    requests_table,
    rows_of,
    shown_lines,
    sorted_requests,
)
from llamasup.cli.target import models_to_show, with_client
from llamasup.errors import ControlFailed, LlamasupError, NotRunning, Stopping

if TYPE_CHECKING:
    from rich.text import Text

    from llamasup.cli.output.view import View
    from llamasup.core.control.client import ControlClient

commands = command_set()

REFRESH_S = 1.0
ENDED = 20
_ENDS = (ControlFailed, NotRunning, Stopping)
_STYLES = {"heading": "bold", "chosen": "reverse", "dim": "dim", "warning": "yellow"}


@commands.command()
@with_client
def top(view: View, client: ControlClient, *, json: o.Json = False) -> None:
    """Show the models and the requests of a running llamasup, live.

    Keys choose a request, sort, cancel, and open the log of a model. Without a terminal, the command prints
    the tables once.
    """
    if json:
        write_json(client.requests(ended=ENDED))
    elif sys.stdin.isatty() and stdout_columns() is not None:
        if not _Top(client).run():
            view.say("info", "control", "llamasup has ended.")
    else:
        _print_once(client)


def _print_once(client: ControlClient) -> None:
    models, live = _read_status(client)["models"], client.requests()["live"]
    tables = [models_table(models, stdout_columns())] if models else []
    tables.append(requests_table(live, stdout_columns()) if live else "No request is in flight.")
    write_result("\n\n".join(tables))


def _read_status(client: ControlClient) -> Mapping[str, Any]:
    """Return the status, without the models that are not loaded."""
    status = client.status()
    models, _ = models_to_show(status, all_=False)
    return {**status, "models": models}


class _Top:
    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._screen = Screen()
        self._status: Mapping[str, Any] = {"models": ()}
        self._requests: Mapping[str, Any] = {"live": (), "ended": ()}

    def run(self) -> bool:
        """Run until the user quits (True), or llamasup exits (False)."""
        from rich.console import Console
        from rich.live import Live

        from llamasup.core.system.native import native

        console = Console()
        self._refresh()
        with native.keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            refreshed_s = monotonic()
            while True:
                live.update(_text(self._lines(console.width, console.height)), refresh=True)
                try:
                    key = keys.next(max(0.0, refreshed_s + REFRESH_S - monotonic()))
                except EOFError:
                    return True
                try:
                    if key is not None and self._press(key):
                        return True
                    if key is None or monotonic() - refreshed_s >= REFRESH_S:
                        self._refresh()
                        refreshed_s = monotonic()
                except _ENDS as error:
                    if not self._has_ended(error):
                        raise
                    return False

    def _has_ended(self, error: LlamasupError) -> bool:
        """Whether llamasup is gone. It may also be suspended, or its connection may just have broken."""
        for _ in range(2):
            if not isinstance(error, ControlFailed):
                break
            try:
                self._client.status()
            except _ENDS as again:
                error = again
            else:
                return False
        return not isinstance(error, ControlFailed)

    def _refresh(self) -> None:
        self._status = _read_status(self._client)
        self._requests = self._client.requests(ended=ENDED)

    def _press(self, key: str) -> bool:
        """Apply a key; return whether the user quits."""
        rows = rows_of(self._status, sorted_requests(self._requests["live"], self._screen.sort))
        self._screen, action = press(self._screen, key, rows)
        match action:
            case Cancel(request):
                try:
                    self._client.cancel(request)
                except LlamasupError as error:
                    self._screen = replace(self._screen, message=error.message)
                self._refresh()
            case Quit():
                return True
            case None:
                pass
        return False

    def _lines(self, columns: int, lines: int) -> Sequence[Line]:
        if self._screen.log_of:
            return self._log(columns, lines)
        return shown_lines(self._screen, self._status, self._requests, columns=columns, lines=lines)

    def _log(self, columns: int, lines: int) -> Sequence[Line]:
        model = self._screen.log_of
        try:
            log = b"".join(self._client.log(model, lines=lines)).decode(errors="replace")
        except LlamasupError as error:
            self._screen = Screen(sort=self._screen.sort, message=error.message)
            return self._lines(columns, lines)
        return log_lines(model, log.splitlines(), columns=columns, lines=lines)


def _text(lines: Iterable[Line]) -> Text:
    from rich.text import Text

    text = Text("\n", no_wrap=True, overflow="ellipsis").join(
        Text(line.text, style=_STYLES.get(line.style, "")) for line in lines
    )
    text.no_wrap = True
    return text
