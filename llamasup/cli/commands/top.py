"""Shows the models and the requests of a running llamasup, live in the terminal (``llamasup top``)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.output.layout import cut_to, fitted_table, stdout_columns, with_nodes
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.status_table import models_table
from llamasup.cli.output.view import duration_text, plural
from llamasup.cli.target import models_to_show, with_client
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.system.text import printable
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

    Use the keyboard to choose a request, sort, cancel, and open the log of a model. Without a terminal, the
    command prints the tables once.
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

        from llamasup.core.system.native.keyboard import keyboard

        console = Console()
        self._refresh()
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
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
        self._screen, cancelled = press(self._screen, key, rows)
        if cancelled:
            try:
                self._client.cancel(cancelled)
            except LlamasupError as error:
                self._screen = replace(self._screen, message=error.message)
            self._refresh()
        return self._screen.quits

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


# --- the screen ------------------------------------------------------------------------------------


Request = Mapping[str, Any]

SORTS = ("age", "tokens", "speed", "model", "client")
_HEADINGS = ("REQUEST", "MODEL", "CLIENT", "PHASE", "AGE", "PROMPT", "TOKENS", "TOKENS/S", "PATH")
_ENDED_HEADINGS = ("ENDED", "MODEL", "CLIENT", "OUTCOME", "TIME", "PROMPT", "TOKENS", "TOKENS/S", "PATH")
# Left out on a narrow terminal, in this order.
_OPTIONAL = ("PATH", "PROMPT", "CLIENT", "TOKENS/S", "MODEL")
HELP: Final = "↑ ↓ choose   s sort   c cancel the request   l log of the model   q quit"
LOG_HELP: Final = "Esc or q back"


class Row(NamedTuple):
    """A row that can be chosen. ``request``: the id of the request; empty for a model. Clients may give
    several requests the same id: ``number`` counts them. ``node``: the other node of the model, or the one
    that works on the request.
    """

    model: str
    request: str = ""
    number: int = 0
    node: str = ""


class Line(NamedTuple):
    """A line. Its ``style`` is ``""``, ``"heading"``, ``"chosen"``, ``"dim"`` or ``"warning"``."""

    text: str
    style: str = ""


class Screen(Struct, frozen=True):
    """The choices of the user. ``cancels`` is the request whose cancellation waits for a yes, ``log_of`` the
    model whose log is shown (empty: none), and ``message`` the result of the last key.
    """

    chosen: Row | None = None
    sort: str = SORTS[0]
    cancels: str = ""
    log_of: str = ""
    message: str = ""
    quits: bool = False


def rows_of(status: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> Sequence[Row]:
    """Return the rows in the order of the screen. ``requests`` are sorted."""
    rows = [Row(str(model["id"]), node=_node(model)) for model in status["models"]]
    seen: Counter[str] = Counter()
    for request in requests:
        id_ = str(request["id"])
        rows.append(Row(str(request.get("model") or ""), id_, seen[id_], _node(request)))
        seen[id_] += 1
    return rows


def _node(of: Mapping[str, Any]) -> str:
    return str(of.get("node") or "")


def press(screen: Screen, key: str, rows: Sequence[Row]) -> tuple[Screen, str]:
    """Apply a key: a character, or ``up``, ``down``, ``escape``. Returns also the request to cancel."""
    screen = replace(screen, message="")
    if screen.log_of:
        return (replace(screen, log_of="") if key in ("escape", "q") else screen), ""
    if screen.cancels:
        return replace(screen, cancels=""), screen.cancels if key == "y" else ""
    chosen = _still_shown(screen.chosen, rows)
    match key:
        case "q":
            return replace(screen, quits=True), ""
        case "up" | "k" | "down" | "j":
            return replace(screen, chosen=_moved(chosen, rows, 1 if key in ("down", "j") else -1)), ""
        case "s":
            return replace(screen, sort=SORTS[(SORTS.index(screen.sort) + 1) % len(SORTS)]), ""
        case "c" if chosen is not None and chosen.request:
            return replace(screen, cancels=chosen.request), ""
        case "c":
            return replace(screen, message="Choose a request with ↑ and ↓ first."), ""
        case "l" if chosen is not None and chosen.node:
            return replace(screen, message=_where_the_log_is(chosen)), ""
        case "l" if chosen is not None and chosen.model:
            return replace(screen, log_of=chosen.model), ""
        case "l":
            return replace(screen, message="Choose a model or a request with ↑ and ↓ first."), ""
        case _:
            return screen, ""


def _where_the_log_is(row: Row) -> str:
    """Say where to find a log. A fleet names a node MODEL@ID, and only fronts have its key."""
    node = printable(row.node)
    if row.node.startswith(f"{row.model}@"):
        return f"The log of the node {node} is in Ray's log of this replica: see the dashboard of Ray."
    return f"The log is on the node {node}: run `llamasup logs --url URL` with the URL of the node."


def _still_shown(chosen: Row | None, rows: Sequence[Row]) -> Row | None:
    """Find the row of ``chosen`` again: a request may have moved to another node."""
    if chosen is None or chosen in rows:
        return chosen
    return next((row for row in rows if row.request and row[:3] == chosen[:3]), None)


def _moved(chosen: Row | None, rows: Sequence[Row], by: int) -> Row | None:
    if not rows:
        return None
    if chosen is None:
        return rows[0 if by > 0 else -1]
    return rows[max(0, min(len(rows) - 1, rows.index(chosen) + by))]


def shown_lines(
    screen: Screen,
    status: Mapping[str, Any],
    requests: Mapping[str, Any],
    *,
    columns: int,
    lines: int,
) -> Sequence[Line]:
    """Return the lines from top to bottom. If the terminal is short, the tables lose their last rows."""
    live = sorted_requests(requests["live"], screen.sort)
    rows = rows_of(status, live)
    chosen = _still_shown(screen.chosen, rows)
    models = _marked(models_table(status["models"], columns), rows, chosen)
    rest = rows[len(status["models"]) :]
    table = _marked(requests_table(live, columns), rest, chosen) if live else []
    ended = ended_table(requests["ended"], columns).splitlines() if requests["ended"] else []
    room = lines - 5  # the title, the blank lines and the last line
    models = _window(models, max(3, room // 3) if live or ended else room)
    table = _window(table, room - len(models))
    ended = ended[: max(0, room - len(models) - len(table))]
    body = [
        _title(status, len(live), screen),
        Line(""),
        *models,
        Line(""),
        *(table or [Line("No request is in flight.", "dim")]),
        Line(""),
        *(Line(text, "dim") for text in ended),
    ]
    body = body[: lines - 1]
    body += [Line("")] * (lines - 1 - len(body))
    return [*(Line(cut_to(columns, line.text), line.style) for line in body), _last(screen, columns)]


def _title(status: Mapping[str, Any], in_flight: int, screen: Screen) -> Line:
    version, url = printable(str(status.get("version"))), printable(str(status.get("url")))
    uptime = duration_text(float(status.get("uptime_s") or 0))
    flight = f"{plural(in_flight, 'request')} in flight, sorted by {screen.sort}"
    return Line(f"llamasup {version} at {url}, up {uptime} · {flight}", "heading")


def _marked(table: str, rows: Sequence[Row], chosen: Row | None) -> list[Line]:
    heading, *others = table.splitlines()
    marked = [Line(text, "chosen" if row == chosen else "") for text, row in zip(others, rows, strict=False)]
    return [Line(heading, "heading"), *marked]


def _window(table: list[Line], height: int) -> list[Line]:
    """The heading, and the rows around the chosen one."""
    if len(table) <= max(1, height):
        return table
    heading, *rows = table
    at = next((number for number, row in enumerate(rows) if row.style == "chosen"), 0)
    first = max(0, min(at - height // 2, len(rows) - height + 1))
    return [heading, *rows[first : first + max(1, height - 1)]]


def _last(screen: Screen, columns: int) -> Line:
    if screen.cancels:
        question = f"Cancel the request {printable(screen.cancels)}? y: yes, other keys: no"
        return Line(cut_to(columns, question), "warning")
    if screen.message:
        return Line(cut_to(columns, screen.message), "warning")
    return Line(cut_to(columns, HELP), "dim")


def log_lines(model: str, log: Sequence[str], *, columns: int, lines: int) -> Sequence[Line]:
    """Show the end of the log of ``model``."""
    title = Line(cut_to(columns, f"Log of {printable(model)}"), "heading")
    room = max(0, lines - 2)
    last = [Line(cut_to(columns, printable(text))) for text in log[max(0, len(log) - room) :]]
    blank = [Line("")] * (room - len(last))
    return [title, *last, *blank, Line(LOG_HELP, "dim")][:lines]


# --- the tables of requests --------------------------------------------------------------------------


def sorted_requests(requests: Sequence[Request], by: str) -> Sequence[Request]:
    """Sort by one of SORTS: the oldest, the largest or the fastest first, or in alphabetical order."""
    return sorted(requests, key=_SORT_KEYS[by])


def requests_table(requests: Sequence[Request], columns: int | None = None) -> str:
    """One row for each request in flight."""
    rows = [
        _request_row(request, request["id"], _client(request), _phase(request), request["age_s"])
        for request in requests
    ]
    return fitted_table(with_nodes([_HEADINGS, *rows], requests), _OPTIONAL, columns)


def ended_table(ended: Sequence[Request], columns: int | None = None) -> str:
    """One row for each finished request (a record of the access log)."""
    optional = ["ENDED" if heading == "REQUEST" else heading for heading in _OPTIONAL]
    rows = []
    for request in ended:
        client = printable(str(request.get("client") or "-")).removeprefix("key:")
        cause = str(request.get("cause") or "").replace("_", " ")
        outcome = f"{request['status']} {request['outcome']}" + (f": {cause}" if cause else "")
        rows.append(_request_row(request, request["request_id"], client, outcome, request["duration_s"]))
    return fitted_table([_ENDED_HEADINGS, *rows], optional, columns)


def _request_row(request: Request, id_: object, client: str, state: str, seconds: float) -> tuple[str, ...]:
    return (
        printable(str(id_)),
        printable(str(request.get("model") or "-")),
        client,
        state,
        duration_text(seconds),
        *_tokens(request),
        printable(str(request["path"])),
    )


def _client(request: Request) -> str:
    return printable(str(request.get("key") or request.get("client") or "-"))


_SORT_KEYS: Final[Mapping[str, Callable[[Request], Any]]] = {
    "age": lambda request: -request["age_s"],
    "tokens": lambda request: -(request.get("tokens_completion") or 0),
    "speed": lambda request: -(request.get("tokens_per_s") or 0.0),
    "model": lambda request: str(request.get("model") or ""),
    "client": _client,
}


def _tokens(request: Request) -> tuple[str, str, str]:
    prompt, completion = request.get("tokens_prompt"), request.get("tokens_completion")
    speed = request.get("tokens_per_s")
    return (
        "-" if prompt is None else str(prompt),
        "-" if completion is None else str(completion),
        "-" if speed is None else f"{speed:.1f}",
    )


def _phase(request: Request) -> str:
    """Format the phase: ``loading 43 %, 12 s left``, ``queued #2, about 12.0 s``, ``generating``."""
    phase = str(request["phase"])
    if (percent := request.get("percent")) is not None:
        return f"{phase} {progress_text(percent, request.get('eta_s'))}"
    if (position := request.get("position")) is not None:
        wait_s = request.get("expected_wait_s")
        return f"{phase} #{position}" + ("" if wait_s is None else f", about {duration_text(wait_s)}")
    return phase
