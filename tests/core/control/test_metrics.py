from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from llamasup.core.http.routes import route_of
from llamasup.core.observability.counters import InstanceGauges, Metrics, NodeGauges, RequestRecord
from llamasup.core.observability.prometheus import CONTENT_TYPE, exposition
from llamasup.core.supervision.states import State

LLAMA_SERVER = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 36
# HELP llamacpp:n_tokens_max Largest observed n_tokens.
# TYPE llamacpp:n_tokens_max counter
llamacpp:n_tokens_max 32
"""


def record(**changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "request_id": "1",
        "method": "POST",
        "path": "/completion",
        "route": "/completion",
        "model": "tiny",
        "generation": 1,
        "status": 200,
        "tokens_prompt": 10,
        "tokens_cached": 2,
        "tokens_completion": 5,
        "tokens_per_s": 50.0,
        "queue_s": 0.0,
        "first_byte_s": 0.02,
        "duration_s": 0.12,
        "bytes_out": 100,
        "outcome": "ok",
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_requests_tokens_and_times_are_counted_by_model() -> None:
    metrics = Metrics()
    metrics.count_request(record())
    metrics.count_request(record(duration_s=45.0))
    metrics.count_restart("tiny", "killed")
    metrics.observe_load("tiny", 1.5)
    seen = values(exposition(metrics, [], {}))

    requests = (("code", "200"), ("model", "tiny"), ("route", "/completion"))
    assert seen["llamasup_requests_total", requests] == 2
    assert seen["llamasup_tokens_total", (("kind", "completion"), ("model", "tiny"))] == 10
    assert seen["llamasup_restarts_total", (("cause", "killed"), ("model", "tiny"))] == 1
    assert seen["llamasup_request_seconds_bucket", (("le", "0.25"), ("model", "tiny"))] == 1
    assert seen["llamasup_request_seconds_bucket", (("le", "60.0"), ("model", "tiny"))] == 2
    assert seen["llamasup_request_seconds_count", (("model", "tiny"),)] == 2
    assert seen["llamasup_load_seconds_sum", (("model", "tiny"),)] == 1.5


CONTRACT = {
    "llamasup_requests_total": {"model", "route", "code"},
    "llamasup_request_seconds_bucket": {"model", "le"},
    "llamasup_first_byte_seconds_bucket": {"model", "le"},
    "llamasup_queue_seconds_bucket": {"model", "le"},
    "llamasup_tokens_per_second_bucket": {"model", "le"},
    "llamasup_load_seconds_bucket": {"model", "le"},
    "llamasup_tokens_total": {"model", "kind"},
    "llamasup_context_ends_total": {"model", "kind"},
    "llamasup_instance_state": {"model", "state"},
    "llamasup_restarts_total": {"model", "cause"},
    "llamasup_replays_total": {"model"},
    "llamasup_batch_gave_way_total": {"model"},
    "llamasup_loads_total": {"model"},
    "llamasup_evictions_total": {"model", "reason"},
    "llamasup_in_flight": {"model"},
    "llamasup_queued": {"model"},
    "llamasup_build_info": {"version"},
    "process_resident_memory_bytes": set(),
    "process_open_fds": set(),
}


def test_every_metric_of_the_contract_is_there_with_its_labels() -> None:
    metrics = Metrics()
    metrics.count_request(record())
    metrics.count_restart("tiny", "killed")
    metrics.count_request(record(outcome="gave_way"))
    metrics.count_replay("tiny")
    metrics.count_load("tiny")
    metrics.count_eviction("tiny", "ttl")
    metrics.observe_load("tiny", 1.5)
    seen = values(exposition(metrics, [InstanceGauges("tiny", State.READY, 0, 0)], {"tiny": LLAMA_SERVER}))
    labels: dict[str, set[str]] = {}
    for name, pairs in seen:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    assert {name: labels.get(name) for name in CONTRACT} == CONTRACT
    assert labels["llamacpp:prompt_tokens_total"] == {"model"}


def test_every_family_has_one_type_and_one_help_and_they_come_before_its_samples() -> None:
    metrics = Metrics()
    metrics.count_request(record())
    text = exposition(metrics, [], {"a": LLAMA_SERVER, "b": LLAMA_SERVER}).decode()
    for kind in ("TYPE", "HELP"):
        families = [line.split()[2] for line in text.splitlines() if line.startswith(f"# {kind}")]
        assert len(families) == len(set(families))
    known: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            known.add(line.split()[2])
        elif not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            assert {name, *(name.removesuffix(end) for end in ("_bucket", "_sum", "_count"))} & known, line


def test_invented_paths_and_models_add_no_labels() -> None:
    metrics = Metrics()
    for number in range(500):
        made_up = b"/%d/v1/chat/completions" % number
        metrics.count_request(record(model="", path=made_up.decode(), route=route_of(made_up).label))
    assert list(metrics.requests) == [("", "other", 200)]


def test_lost_access_log_lines_are_counted_if_there_is_a_log() -> None:
    metrics = Metrics()
    assert b"access_log" not in exposition(metrics, [], {})
    metrics.lines_dropped = lambda: 7
    assert values(exposition(metrics, [], {}))["llamasup_access_log_dropped_total", ()] == 7


def test_content_type_names_the_format() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_unserved_request_is_counted_for_its_model_without_times() -> None:
    metrics = Metrics()
    metrics.count_request(record(generation=0, status=503, outcome="unavailable"))
    seen = values(exposition(metrics, [], {}))
    labels = (("code", "503"), ("model", "tiny"), ("route", "/completion"))
    assert seen["llamasup_requests_total", labels] == 1
    assert not any(name.startswith("llamasup_request_seconds") for name, _ in seen)


def test_loads_and_evictions_are_counted_one_by_one() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.count_load("tiny")
    for reason in ("memory", "ttl", "memory"):
        metrics.count_eviction("tiny", reason)
    seen = values(exposition(metrics, [], {}))
    assert seen["llamasup_loads_total", (("model", "tiny"),)] == 3
    assert seen["llamasup_evictions_total", (("model", "tiny"), ("reason", "memory"))] == 2
    assert seen["llamasup_evictions_total", (("model", "tiny"), ("reason", "ttl"))] == 1


def test_the_processes_of_one_model_are_counted_together() -> None:
    """Prometheus refuses a text that has one sample twice. Their queue is one and the same."""
    instances = [
        InstanceGauges("tiny", State.READY, 2, 5),
        InstanceGauges("tiny", State.READY, 1, 5),
        InstanceGauges("tiny", State.LOADING, 0, 5),
        InstanceGauges("other", State.READY, 4, 0),
    ]
    text = exposition(Metrics(), instances, {})
    samples = [line.rpartition(" ")[0] for line in text.decode().splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    seen = values(text)
    assert seen["llamasup_instance_state", (("model", "tiny"), ("state", "ready"))] == 2
    assert seen["llamasup_instance_state", (("model", "tiny"), ("state", "loading"))] == 1
    assert seen["llamasup_instance_state", (("model", "other"), ("state", "ready"))] == 1
    assert seen["llamasup_in_flight", (("model", "tiny"),)] == 3
    assert seen["llamasup_queued", (("model", "tiny"),)] == 5


def test_exactly_one_state_of_an_instance_is_1() -> None:
    seen = values(exposition(Metrics(), [InstanceGauges("tiny", State.LOADING, 3, 1)], {}))
    states = {
        dict(labels)["state"]: value
        for (name, labels), value in seen.items()
        if name == "llamasup_instance_state"
    }

    assert [state for state, value in states.items() if value] == ["loading"]
    assert set(states) == {state.value for state in State}
    assert seen["llamasup_in_flight", (("model", "tiny"),)] == 3
    assert seen["llamasup_queued", (("model", "tiny"),)] == 1


def test_llama_servers_own_metrics_keep_their_names_and_get_a_model_label() -> None:
    text = exposition(Metrics(), [], {"a": LLAMA_SERVER, 'b"\\': LLAMA_SERVER}).decode()

    assert 'llamacpp:prompt_tokens_total{model="a"} 36' in text
    assert 'llamacpp:n_tokens_max{model="b\\"\\\\"} 32' in text
    assert text.count("# TYPE llamacpp:n_tokens_max counter") == 1
    assert text.index('n_tokens_max{model="a"}') < text.index('n_tokens_max{model="b') < len(text)


def test_labels_that_a_sample_already_has_are_kept() -> None:
    text = exposition(Metrics(), [], {"a": 'x_bucket{le="1"} 2\n'}).decode()
    assert 'x_bucket{model="a",le="1"} 2' not in text  # a sample of no family is no metric
    text = exposition(Metrics(), [], {"a": '# TYPE x_bucket counter\nx_bucket{le="1"} 2\n'}).decode()
    assert 'x_bucket{model="a",le="1"} 2' in text


def test_other_nodes_have_their_state_and_requests() -> None:
    nodes = NodeGauges({"desk": "ready"}, {"desk": 2}, {"tale": 3})
    seen = values(exposition(Metrics(), [], {}, nodes))
    assert seen["llamasup_node_state", (("node", "desk"), ("state", "ready"))] == 1
    assert seen["llamasup_node_in_flight", (("node", "desk"),)] == 2
    assert seen["llamasup_node_queued", (("model", "tale"),)] == 3
    assert b"llamasup_node" not in exposition(Metrics(), [], {})
