"""The Grafana board of configs/grafana/: its queries name what /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from llamasup.core.observability.prometheus import own_families
from scripts.generated import grafana_board
from tests.kit.paths import ROOT

TARGET = {"instance", "job"}  # labels that Prometheus itself adds


def metrics() -> Mapping[str, set[str]]:
    """The labels of each metric that the board may use."""
    known: dict[str, set[str]] = {}
    for family in own_families():
        labels = set(family._labelnames)  # type: ignore[attr-defined]
        match family.type:
            case "histogram":
                known[f"{family.name}_bucket"] = {*labels, "le"}
                known[f"{family.name}_sum"] = known[f"{family.name}_count"] = labels
            case "counter":
                known[f"{family.name}_total"] = labels
            case _:
                known[family.name] = labels
    known |= {name: {"model"} for name in grafana_board.OF_LLAMA_SERVER}
    return known | {name: set() for name in grafana_board.OF_THE_PROCESS}


class Used(NamedTuple):
    """What a query names. ``kept``: the labels of its result, by which it may be called; None: all."""

    metrics: set[str]
    labels: Mapping[str, set[str]]
    kept: set[str] | None


def parsed(promql: str) -> Any:
    return promql_parser.parse(promql.replace("$__rate_interval", "5m"))


def used(promql: str) -> Used:
    """The metrics, their labels and the labels of the result, as a parser of PromQL sees them."""
    labels: dict[str, set[str]] = {}
    kept: set[str] | None = None

    def visit(node: Any, grouped: set[str]) -> None:
        nonlocal kept
        match node:
            case promql_parser.VectorSelector() if node.name is not None:
                names = {matcher.name for matcher in node.matchers.matchers}
                labels.setdefault(node.name, set()).update(names | grouped)
            case promql_parser.MatrixSelector():
                visit(node.vector_selector, grouped)
            case promql_parser.AggregateExpr():
                by = set() if node.modifier is None else set(node.modifier.labels)
                kept = by if kept is None else kept | by
                visit(node.expr, grouped | by)
            case promql_parser.BinaryExpr():
                visit(node.lhs, grouped)
                visit(node.rhs, grouped)
            case promql_parser.ParenExpr():
                visit(node.expr, grouped)
            case promql_parser.Call():
                for argument in node.args:
                    visit(argument, grouped)
            case promql_parser.NumberLiteral():
                pass
            case _:
                raise AssertionError(f"{node} in {promql}")

    visit(parsed(promql), set())
    return Used(set(labels), labels, kept)


def board() -> Any:
    return json.loads(grafana_board.BOARD.read_text("utf-8"))


def targets() -> Iterator[tuple[str, str, str]]:
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def test_every_query_names_only_metrics_and_labels_that_exist() -> None:
    known = metrics()
    for title, promql, legend in targets():
        found = used(promql)
        assert found.metrics, title
        for metric, labels in found.labels.items():
            assert metric in known, f"{title}: {metric}"
            assert labels <= known[metric] | TARGET, f"{title}: {labels - known[metric]} of {metric}"
        called = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert called <= (TARGET if found.kept is None else found.kept), f"{title}: {legend}"


def test_query_of_an_unknown_metric_or_label_would_be_found() -> None:
    found = used('sum by (cause) (rate(llamasup_gone_total{planet="x"}[5m]))')
    assert (found.metrics, found.kept) == ({"llamasup_gone_total"}, {"cause"})
    assert found.labels["llamasup_gone_total"] == {"planet", "cause"}
    with pytest.raises(ValueError, match="parenthesis"):
        parsed("sum(rate(llamasup_gone_total[5m])")


def test_every_metric_of_the_table_is_on_the_board_or_left_out_on_purpose() -> None:
    on_board = set().union(*(used(promql).metrics for _, promql, _ in targets()))
    shown = {re.sub(r"_(bucket|sum|count)$", "", metric) for metric in on_board}
    table = {family.name + ("_total" if family.type == "counter" else "") for family in own_families()}
    assert table - shown == grafana_board.LEFT_OUT
    assert on_board >= grafana_board.OF_LLAMA_SERVER | grafana_board.OF_THE_PROCESS


def test_the_metrics_of_the_process_are_those_of_the_library() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    samples = {sample.name for family in registry.collect() for sample in family.samples}
    if not samples:
        pytest.skip("no /proc")
    assert samples >= grafana_board.OF_THE_PROCESS


def test_the_board_has_the_form_that_grafana_imports() -> None:
    shown = board()
    assert (shown["id"], shown["uid"], shown["title"]) == (None, "llamasup", "llamasup")
    assert shown["schemaVersion"] >= 36
    names = {variable["name"]: variable for variable in shown["templating"]["list"]}
    assert names["datasource"]["type"] == "datasource"
    assert names["model"]["multi"] is names["model"]["includeAll"] is True
    for variable in ("instance", "model"):
        query = names[variable]["query"]["query"]
        selector = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert selector is not None
        assert selector[2] == variable
        (metric,) = used(selector[1]).metrics
        assert variable in metrics()[metric] | TARGET
    panels = shown["panels"]
    numbers = [panel["id"] for panel in panels]
    assert len(set(numbers)) == len(numbers) > 20
    for panel in panels:
        assert panel["type"] in ("row", "stat", "timeseries")
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            variables = set(re.findall(r"\$(\w+)", target["expr"]))
            assert variables <= {*names, "__rate_interval"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < grafana_board.COLUMNS, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_example_of_a_scrape_config_reads_the_default_address() -> None:
    config = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]
    assert "metrics_path" not in job  # /metrics is the default
