"""Models that another program than llama-server serves: which requests reach it, and how."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamasup.core.http.heads import HttpError
from llamasup.core.models.spec import ModelSpec
from llamasup.core.proxy import ProxyConfig
from llamasup.core.settings.model import Engine
from tests.core.http.test_requested_model import form, part
from tests.core.planning.plans import model
from tests.core.proxy.conftest import MakeRig
from tests.core.proxy.key_files import keys_of
from tests.core.proxy.many import ManyModels
from tests.core.proxy.rig import CHAT, Rig, answer, get, post, status

LOADING = HttpError(503, "Loading model", cause="loading", retry_after_s=1.0, queueable=True, absent=True)
SPEECH, TRANSCRIBE = "/v1/audio/speech", "/v1/audio/transcriptions"
TEXT = ModelSpec("text", "/text.gguf", listed=model())
VOICE = ModelSpec("voice", "", engine=Engine(program="v", routes=(SPEECH, "/x/*")))
EARS = ModelSpec("ears", "", engine=Engine(program="e", routes=(TRANSCRIBE, "/x/*", CHAT.decode())))


@pytest.fixture
def many(make_rig: MakeRig, tmp_path: Path) -> Iterator[Callable[..., tuple[Rig, ManyModels]]]:
    made: list[ManyModels] = []

    def make(config: ProxyConfig | None = None) -> tuple[Rig, ManyModels]:
        rig = make_rig(config or ProxyConfig())
        found = rig.call(lambda: ManyModels(tmp_path, [TEXT, VOICE, EARS], default="text"))
        rig.proxy.backend = found
        engines = [(spec.id, spec.engine) for spec in (VOICE, EARS) if spec.engine is not None]
        rig.proxy.owners = lambda path: tuple(id_ for id_, engine in engines if engine.answers(path))
        made.append(found)
        return rig, found

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("request_", "served_by", "label"),
    [
        (post(SPEECH.encode(), b"{}"), "voice", "command"),
        (post(SPEECH.encode(), b'{"model": "voice"}'), "voice", "command"),
        (post(TRANSCRIBE.encode(), form(part("language", b"en"))), "ears", TRANSCRIBE),
        (post(b"/x/y", form(part("model", b"ears"))), "ears", "command"),
        (get(b"/x/voices?model=voice&z=1"), "voice", "command"),
        (get(b"/v1/audio/speech"), "voice", "command"),
        (post(CHAT, b'{"model": "ears"}'), "ears", CHAT.decode()),
        (post(CHAT, b'{"model": "text"}'), "text", CHAT.decode()),
        (get(b"/x/y"), "text", "other"),  # of several programs, none is meant
    ],
)
def test_request_reaches_the_model_of_its_path(
    request_: bytes, served_by: str, label: str, many: Callable[..., tuple[Rig, ManyModels]]
) -> None:
    rig, models = many()
    client = rig.send(request_)
    child = models.accept(served_by, rig)
    head, _ = child.message()
    assert head.partition(b"\r\n")[0] == request_.partition(b"\r\n")[0]
    child.send(answer(b"\x89PNG", b"Content-Type: image/png", b"Connection: close"))
    answered, body = client.message()
    assert body == b"\x89PNG"
    assert b"content-type: image/png" in answered.lower()
    record = rig.record()
    assert (record.model, record.route) == (served_by, label)


def test_requests_of_each_method_wait_for_a_load(many: Callable[..., tuple[Rig, ManyModels]]) -> None:
    rig, models = many()
    models.by_id["voice"].unavailable = LOADING
    clients = [rig.send(request) for request in (get(b"/x/a?model=voice"), post(SPEECH.encode(), b"{}"))]
    rig.call(models.by_id["voice"].loaded)
    for client in clients:
        child = models.accept("voice", rig)
        child.message()
        child.send(answer(b"{}", b"Connection: close"))
        assert status(client.message()[0]) == 200


@pytest.mark.parametrize(
    ("request_", "code", "cause"),
    [
        (post(CHAT, b'{"model": "voice"}'), 404, "unserved_path"),
        (post(b"/v1/embeddings", b'{"model": "voice"}'), 404, "unserved_path"),
        (post(b"/x/../y", b'{"model": "voice"}'), 404, "unserved_path"),
        (post(b"/x/%252e%252e/y", b'{"model": "voice"}'), 404, "unserved_path"),
        (post(b"/tools", b'{"model": "voice"}'), 403, "closed_path"),
        (post(b"/x/y", b'{"model": "nobody"}'), 404, "model_not_found"),
        (post(b"/slots/0?action=save", b'{"model": "voice"}'), 403, "closed_path"),
    ],
)
def test_other_requests_are_refused_with_the_reason(
    request_: bytes, code: int, cause: str, many: Callable[..., tuple[Rig, ManyModels]]
) -> None:
    rig, _ = many()
    head, body = rig.ask(request_)
    assert (status(head), json.loads(body)["error"]["cause"]) == (code, cause)


def test_model_is_listed_and_described(many: Callable[..., tuple[Rig, ManyModels]]) -> None:
    rig, _ = many()
    head, body = rig.ask(get(b"/v1/models/voice"))
    assert status(head) == 200
    entry = json.loads(body)
    assert entry["llamasup"]["kind"] == "command"
    assert entry["architecture"]["output_modalities"] == []


def test_key_of_another_model_learns_nothing(many: Callable[..., tuple[Rig, ManyModels]]) -> None:
    rig, _ = many(ProxyConfig(key_file=keys_of("KEY models=text")))
    own = b"Authorization: Bearer KEY"
    for request in (post(SPEECH.encode(), b"{}", own), post(CHAT, b'{"model": "voice"}', own)):
        head, body = rig.ask(request)
        assert (status(head), json.loads(body)["error"]["cause"]) == (403, "key_models")
