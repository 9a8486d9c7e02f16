"""The Grafana board of the metrics, from the table ``ROWS``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from scripts.pages import ROOT

BOARD = ROOT / "configs" / "grafana" / "llamasup.json"
COLUMNS: Final = 24  # of a board in Grafana
SCHEMA: Final = 39  # of Grafana 10.4; later ones migrate it

LEFT_OUT: Final[frozenset[str]] = frozenset()
"""Metrics of llamasup that are on no panel on purpose."""

OF_LLAMA_SERVER: Final = frozenset(
    {
        "llamacpp:n_busy_slots_per_decode",
        "llamacpp:requests_deferred",
        "llamacpp:requests_processing",
    }
)
"""The metrics of llama-server (b11434) on the board, which /metrics passes on with a ``model`` label."""

OF_THE_PROCESS: Final = frozenset(
    {
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
    }
)
"""The metrics of the llamasup process on the board."""


class Query(NamedTuple):
    """In ``promql``, ``{here}`` selects the chosen instances, and ``{these}`` also the chosen models."""

    promql: str
    legend: str = ""


class Panel(NamedTuple):
    """``kind``: ``timeseries`` or ``stat``. ``unit``: the name of a unit in Grafana."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    stacked: bool = False
    width: int = 8


class Row(NamedTuple):
    title: str
    panels: Sequence[Panel]


def _quantiles(metric: str, *quantiles: float) -> Sequence[Query]:
    buckets = f"sum by (model, le) (rate({metric}_bucket{{these}}[{{rate}}]))"
    return [
        Query(
            f"histogram_quantile({quantile:g}, {buckets})",
            f"{{{{model}}}} p{quantile * 100:g}",
        )
        for quantile in quantiles
    ]


def _stat(title: str, promql: str, unit: str = "short", legend: str = "", text: str = "") -> Panel:
    return Panel(title, [Query(promql, legend)], unit, "stat", text, width=4)


ROWS: Final[Sequence[Row]] = (
    Row(
        "Now",
        (
            _stat("Requests", "sum(rate(llamasup_requests_total{these}[{rate}]))", "reqps"),
            _stat(
                "Failed requests",
                '(sum(rate(llamasup_requests_total{these,code=~"5.."}[{rate}])) or vector(0))'
                " / sum(rate(llamasup_requests_total{these}[{rate}]))",
                "percentunit",
                text="The share of requests with a status of 500 or above.",
            ),
            _stat("Ready llama-servers", 'sum(llamasup_instance_state{these,state="ready"})'),
            _stat("Requests in llama-server", "sum(llamasup_in_flight{these})"),
            _stat("Waiting requests", "sum(llamasup_queued{these})"),
            _stat("Version", "count by (version) (llamasup_build_info{here})", legend="{{version}}"),
        ),
    ),
    Row(
        "Requests",
        (
            Panel(
                "Requests by model",
                [Query("sum by (model) (rate(llamasup_requests_total{these}[{rate}]))", "{{model}}")],
                "reqps",
                text="Without a name: requests for no model.",
            ),
            Panel(
                "Errors by model",
                [
                    Query(
                        'sum by (model, code) (rate(llamasup_requests_total{these,code=~"[45].."}[{rate}]))',
                        "{{model}} {{code}}",
                    )
                ],
                "reqps",
                text="499: the client disconnected, or the request was cancelled.",
            ),
            Panel(
                "Requests by route",
                [Query("sum by (route) (rate(llamasup_requests_total{these}[{rate}]))", "{{route}}")],
                "reqps",
                stacked=True,
            ),
            Panel(
                "Time to the first byte",
                _quantiles("llamasup_first_byte_seconds", 0.5, 0.95),
                "s",
                text="Of a stream, this is the time to the first token.",
            ),
            Panel("Duration of a request", _quantiles("llamasup_request_seconds", 0.5, 0.95), "s"),
            Panel(
                "Effect of the context",
                [
                    Query(
                        "sum by (model, kind) (increase(llamasup_context_ends_total{these}[{rate}]))",
                        "{{model}} {{kind}}",
                    )
                ],
                text="exceeded: the prompt was too long. cut: the answer ended at the limit. shifted: the"
                " oldest tokens were dropped.",
            ),
        ),
    ),
    Row(
        "Queue and slots",
        (
            Panel(
                "Waiting requests",
                [Query("max by (model) (llamasup_queued{these})", "{{model}}")],
                stacked=True,
            ),
            Panel("Wait before llama-server", _quantiles("llamasup_queue_seconds", 0.5, 0.95), "s"),
            Panel(
                "Slots",
                [
                    Query("sum by (model) (llamasup_in_flight{these})", "{{model}} requests"),
                    Query("sum by (model) (llamacpp:requests_processing{these})", "{{model}} slots in use"),
                    Query(
                        "sum by (model) (llamacpp:requests_deferred{these})", "{{model}} wait in the server"
                    ),
                    Query("avg by (model) (llamacpp:n_busy_slots_per_decode{these})", "{{model}} per batch"),
                ],
                text="The requests in llama-server, and its own counts: slots in use, requests that it lets"
                " wait, and the mean number of slots in a batch since its start.",
            ),
        ),
    ),
    Row(
        "Other nodes",
        (
            Panel(
                "State of the nodes",
                [Query("max by (node, state) (llamasup_node_state{here})", "{{node}} {{state}}")],
                text="Only ready nodes get requests.",
            ),
            Panel(
                "Requests on other nodes",
                [
                    Query("sum by (node) (llamasup_node_in_flight{here})", "{{node}} in flight"),
                    Query("sum by (model) (llamasup_node_queued{these})", "{{model}} wait here"),
                ],
            ),
        ),
    ),
    Row(
        "Tokens",
        (
            Panel(
                "Tokens by kind",
                [
                    Query(
                        "sum by (model, kind) (rate(llamasup_tokens_total{these}[{rate}]))",
                        "{{model}} {{kind}}",
                    )
                ],
                "tokens/s",
                text="prompt includes cached: prompt tokens that were already in the cache.",
            ),
            Panel(
                "Prompt tokens from the cache",
                [
                    Query(
                        'sum by (model) (rate(llamasup_tokens_total{these,kind="cached"}[{rate}]))'
                        ' / sum by (model) (rate(llamasup_tokens_total{these,kind="prompt"}[{rate}]))',
                        "{{model}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Generation speed of an answer",
                _quantiles("llamasup_tokens_per_second", 0.1, 0.5),
                "tokens/s",
                text="p10: nine of ten answers are faster.",
            ),
        ),
    ),
    Row(
        "Models",
        (
            Panel(
                "Llama-servers by state",
                [Query("sum by (state) (llamasup_instance_state{these})", "{{state}}")],
                stacked=True,
            ),
            Panel(
                "Loads",
                [Query("sum by (model) (increase(llamasup_loads_total{these}[{rate}]))", "{{model}}")],
            ),
            Panel("Duration of a load", _quantiles("llamasup_load_seconds", 0.5, 0.95), "s"),
            Panel(
                "Unloads by reason",
                [
                    Query(
                        "sum by (model, reason) (increase(llamasup_evictions_total{these}[{rate}]))",
                        "{{model}} {{reason}}",
                    )
                ],
            ),
            Panel(
                "Restarts by cause",
                [
                    Query(
                        "sum by (model, cause) (increase(llamasup_restarts_total{these}[{rate}]))",
                        "{{model}} {{cause}}",
                    )
                ],
            ),
            Panel(
                "Requests that were sent again",
                [Query("sum by (model) (increase(llamasup_replays_total{these}[{rate}]))", "{{model}}")],
                text="Their first llama-server ended before it answered.",
            ),
            Panel(
                "Requests of batches that gave way",
                [
                    Query(
                        "sum by (model) (increase(llamasup_batch_gave_way_total{these}[{rate}]))", "{{model}}"
                    )
                ],
                text="Other clients used the models. The batch sends these requests again.",
            ),
            Panel(
                "Streams whose llama-server ended",
                [
                    Query(
                        "sum by (model, result) (increase(llamasup_continued_streams_total{these}[{rate}]))",
                        "{{model}} {{result}}",
                    )
                ],
                text="Of models that continue them.",
            ),
            Panel(
                "Requests that were repaired",
                [
                    Query(
                        "sum by (model, what) (increase(llamasup_repaired_requests_total{these}[{rate}]))",
                        "{{model}} {{what}}",
                    )
                ],
                text="Conversations with malformed tool calls, of models that ask for it.",
            ),
        ),
    ),
    Row(
        "The llamasup process",
        (
            Panel(
                "Memory of llamasup",
                [Query("process_resident_memory_bytes{here}", "{{instance}}")],
                "bytes",
                text="Without the llama-servers.",
                width=6,
            ),
            Panel(
                "CPU of llamasup",
                [Query("rate(process_cpu_seconds_total{here}[{rate}])", "{{instance}}")],
                "percentunit",
                text="100 %: one core.",
                width=6,
            ),
            Panel(
                "Open files",
                [
                    Query("process_open_fds{here}", "{{instance}}"),
                    Query("process_max_fds{here}", "{{instance}} limit"),
                ],
                width=6,
            ),
            Panel(
                "Lost records",
                [
                    Query(
                        "increase(llamasup_access_log_dropped_total{here}[{rate}])",
                        "{{instance}} access log lines",
                    ),
                    Query(
                        "increase(llamasup_traces_dropped_total{here}[{rate}])",
                        "{{instance}} requests without spans",
                    ),
                ],
                text="Only with an access log, and with traces.",
                width=6,
            ),
        ),
    ),
)

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_FILLED = {
    "{these}": '{instance=~"$instance",model=~"$model"}',
    "{these,": '{instance=~"$instance",model=~"$model",',
    "{here}": '{instance=~"$instance"}',
    "{rate}": "$__rate_interval",
}


def filled(promql: str) -> str:
    """The query with the variables of the board."""
    for mark, text in _FILLED.items():
        promql = promql.replace(mark, text)
    return promql


def queries() -> Iterator[str]:
    """All queries of the board."""
    for row in ROWS:
        for panel in row.panels:
            yield from (filled(query.promql) for query in panel.queries)


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(_heading(len(panels) + 1, row.title, top))
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            height = 4 if panel.kind == "stat" else 8
            place = {"h": height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(len(panels) + 1, panel, place))
            left += panel.width
        top += height
    return {
        "id": None,
        "uid": "llamasup",
        "title": "llamasup",
        "description": "The models and the requests of llamasup. Written by scripts/docs.py.",
        "tags": ["llamasup", "llama.cpp"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("instance", "Instance", "label_values(llamasup_build_info, instance)"),
                _variable(
                    "model", "Model", 'label_values(llamasup_instance_state{instance=~"$instance"}, model)'
                ),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable that is all values until the user chooses; all includes requests for no model."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _heading(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any]
    if panel.kind == "stat":
        shows_name = any(query.legend for query in panel.queries)
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "name" if shows_name else "value",
            "graphMode": "none" if shows_name else "area",
            "colorMode": "value",
        }
    else:
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 20 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "editorMode": "code",
                "expr": filled(query.promql),
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def board_text() -> str:
    return json.dumps(board(), indent=2, ensure_ascii=False) + "\n"
