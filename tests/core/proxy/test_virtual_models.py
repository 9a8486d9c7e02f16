"""Requests for virtual models: what llama-server gets, and under which name they count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Route, Work
from llamasup.core.models.access import ResolvedModel
from llamasup.core.models.spec import ModelSpec
from llamasup.core.proxy import ProxyConfig
from llamasup.core.queueing.endpoint import Endpoint, generation_ended
from llamasup.features.virtual.rewrite import rewritten
from llamasup.features.virtual.settings import Candidate, Changes
from tests.core.http.test_requested_model import form, part
from tests.core.planning.plans import model
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.many import ManyModels, Model
from tests.core.proxy.rig import CHAT, Rig, answer, eventually, get, post, status
from tests.kit.backends import Unlisted

QWEN = ModelSpec("qwen", "/q.gguf", listed=model())
ABSENT = HttpError(503, "The model is not loaded", cause="not_loaded", retry_after_s=1.0, queueable=True)
NAME = "qwen:cold"
CANDIDATE = Candidate("qwen", (Changes(set={"temperature": 0}, system="Be brief."),))
BODY = b'{"model":"qwen:cold","messages":[ {"role":"user","content":"x"} ],"temperature": 1}'
COLD = (
    b'{"model":"qwen","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"x"} ],'
    b'"temperature":0}'
)


class Cold(Unlisted):
    """The route of the virtual model (``VirtualBackend`` has its own tests)."""

    name = NAME
    model = ResolvedModel((NAME,), is_virtual=True)

    def __init__(self, served: Model) -> None:
        self.served = served

    def for_work(self, work: Work | None) -> Cold:
        return self

    @property
    def target(self) -> str:
        return CANDIDATE.model

    def rewrite(self, body: bytes, route: Route) -> bytes | HttpError:
        return rewritten(body, route, NAME, CANDIDATE)


class WithCold(ManyModels):
    def resolve(  # type: ignore[override]
        self, model: str | None, *, create: bool = False, local: bool = False
    ) -> Model | Cold | HttpError:
        return Cold(self.by_id["qwen"]) if model == NAME else super().resolve(model)


Make = Callable[..., tuple[Rig, ManyModels]]


@pytest.fixture
def make(make_rig: MakeRig, tmp_path: Path) -> Iterator[Make]:
    made: list[ManyModels] = []

    def make(config: ProxyConfig | None = None) -> tuple[Rig, ManyModels]:
        rig = make_rig(config or ProxyConfig())
        many = rig.call(lambda: WithCold(tmp_path, [QWEN]))
        rig.proxy.backend = many
        made.append(many)
        return rig, many

    yield make
    for many in made:
        many.close()


def test_llama_server_gets_the_changed_body_and_the_request_counts_by_its_name(make: Make) -> None:
    rig, many = make()
    client = rig.send(post(CHAT, BODY))
    child = many.accept("qwen", rig)
    assert child.message()[1] == COLD
    child.send(answer(b"{}", b"Connection: close"))
    assert status(client.message()[0]) == 200
    record = rig.record()
    assert (record.model, record.generation, record.bytes_in) == (NAME, 1, len(BODY))
    assert {key[0] for key in rig.call(lambda: dict(rig.proxy.metrics.requests))} == {NAME}


@pytest.mark.parametrize(
    "body",
    [
        BODY.replace(b"qwen:cold", b"qwen"),
        b'\xef\xbb\xbf{"model" :"qwen:cold", "model":"qwen",\n"temperature":1.50}\r\n',
        b'{"model":"qwen","messages":"qwen:cold","note":"\\u00e9"}\0',
        form(part("model", b"qwen"), part("note", b"qwen:cold")),
    ],
)
def test_requests_for_other_models_stay_byte_for_byte(make: Make, body: bytes) -> None:
    rig, many = make()
    rig.send(post(CHAT + b"?model=qwen:cold&b=%20", body))
    head, received = many.accept("qwen", rig).message()
    assert head.startswith(b"POST /v1/chat/completions?model=qwen:cold&b=%20 HTTP/1.1\r\n")
    assert received == body


def test_name_in_the_query_is_replaced_and_the_rest_of_the_head_stays(make: Make) -> None:
    rig, many = make()
    for _ in range(2):  # a repeated head comes from a cache
        client = rig.send(get(b"/props?a=1&model=qwen:cold&b", b"Accept: 1"))
        child = many.accept("qwen", rig)
        head = child.message()[0]
        assert head.startswith(b"GET /props?a=1&model=qwen&b HTTP/1.1\r\nHost: localhost\r\n")
        assert b"\r\naccept: 1\r\n" in head.lower()
        child.send(answer(b"{}", b"Connection: close"))
        assert status(client.message()[0]) == 200
        assert rig.record().model == NAME


def test_name_only_in_the_query_changes_the_body_too(make: Make) -> None:
    rig, many = make()
    rig.send(post(CHAT + b"?model=qwen:cold", BODY.replace(b'"model":"qwen:cold",', b"")))
    head, body = many.accept("qwen", rig).message()
    assert head.startswith(b"POST /v1/chat/completions?model=qwen HTTP/1.1\r\n")
    assert json.loads(body)["messages"][0] == {"role": "system", "content": "Be brief."}


def test_waiting_request_is_changed_once_and_sent_again_after_a_crash(make: Make) -> None:
    rig, many = make()
    served = many.by_id["qwen"]
    rig.call(lambda: setattr(served, "unavailable", ABSENT))
    rig.send(post(CHAT, BODY))
    eventually(lambda: served.waits == 1)
    rig.call(served.loaded)
    child = many.accept("qwen", rig)
    assert child.message()[1] == COLD
    broken, next_one = served.endpoint, Endpoint("qwen", 2, served.endpoint.address)
    rig.call(lambda: setattr(served, "endpoint", next_one))
    rig.call(lambda: broken.close(generation_ended("it crashed")))
    again = many.accept("qwen", rig)
    assert again.message()[1] == COLD
    again.send(answer(b"{}"))
    record = rig.record()
    assert (record.model, record.generation, record.replayed) == (NAME, 2, True)
    assert rig.call(lambda: dict(rig.proxy.metrics.replays)) == {NAME: 1}


def test_body_that_cannot_be_changed_is_refused(make: Make) -> None:
    rig, _ = make()
    upload = form(part("file", bytes(1000), 'filename="a.wav"'), part("model", NAME.encode()))
    for request, cause in (
        (post(b"/v1/audio/transcriptions", upload), "virtual_model_body"),
        (post(b"/completion", b'{"model":"qwen:cold","prompt":"x"}'), "virtual_model_system"),
    ):
        head, body = rig.ask(request)
        assert (status(head), json.loads(body)["error"]["cause"]) == (400, cause)
        assert rig.record().outcome == "refused"


def test_key_may_use_the_virtual_models_that_it_names(make: Make) -> None:
    keys = keys_of("sk-1 models=qwen:cold\nsk-2 models=qwen\n")
    rig, many = make(ProxyConfig(key_file=keys))
    denied, _ = rig.ask(post(CHAT, BODY, b"Authorization: Bearer sk-2"))
    assert status(denied) == 403
    itself, _ = rig.ask(post(CHAT, BODY.replace(b":cold", b""), b"Authorization: Bearer sk-1"))
    assert status(itself) == 403
    rig.send(post(CHAT, BODY, b"Authorization: Bearer sk-1"))
    assert many.accept("qwen", rig).message()[1] == COLD


def test_model_for_the_work_of_the_request_is_taken(make: Make) -> None:
    rig, many = make()

    class Mixed(Cold):
        model = ResolvedModel((NAME,), (Work.EMBEDDINGS,), True)

        def for_work(self, work: Work | None) -> Cold:
            assert work is Work.TEXT
            return Cold(many.by_id["qwen"])

    rig.call(lambda: setattr(many, "resolve", lambda *_, **__: Mixed(many.by_id["qwen"])))
    rig.send(post(CHAT, BODY))
    assert many.accept("qwen", rig).message()[1] == COLD


def test_request_is_not_sent_again_to_the_model_of_a_virtual_one_that_hides_its_own(make: Make) -> None:
    rig, many = make()
    served = many.by_id["qwen"]
    client = rig.send(post(CHAT, BODY.replace(b":cold", b"")))
    many.accept("qwen", rig).message()
    broken, next_one = served.endpoint, Endpoint("qwen", 2, served.endpoint.address)

    def reload() -> None:
        served.endpoint = next_one
        setattr(many, "resolve", lambda *_, **__: Cold(served))  # noqa: B010
        broken.close(generation_ended("it crashed"))

    rig.call(reload)
    assert status(client.message()[0]) == 503
    assert not rig.record().replayed
