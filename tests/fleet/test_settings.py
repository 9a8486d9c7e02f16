"""Errors of ``fleet`` in a config that only show together with other keys."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llamasup.fleet.settings import FLEET, is_front, without_models
from tests.core.config.reading import config_of, issue_of

MODELS = "models: {m: {repo: org/m}}\n"
FRONT = MODELS + "fleet: {directory: 'http://head:8000'}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            MODELS + "fleet: {min_replicas: 3, max_replicas: 2}",
            "c.yaml:2: fleet.min_replicas: min_replicas is 3, and max_replicas 2; the least number must not",
        ),
        (
            MODELS + "fleet: {models: {m: {min_replicas: 2}}}",
            "c.yaml:2: fleet.models.m: min_replicas is 2, and max_replicas 1; the least number must not",
        ),
        (
            MODELS + "fleet: {min_replicas: 2, max_replicas: 4, models: {m: {max_replicas: 1}}}",
            "c.yaml:2: fleet.models.m: min_replicas is 2, and max_replicas 1",
        ),
        (MODELS + "fleet: {listen: '0.0.0.0:70000'}", "fleet.listen: invalid port in '0.0.0.0:70000'"),
        (MODELS + "fleet: {listen: 'head'}", "fleet.listen: invalid value"),
        ("models: {m: {repo: org/m, replicas: 2}}\nfleet: {}", "models.m.replicas: has no effect in a fleet"),
        (
            MODELS + "defaults: {replicas: 2}\nfleet: {}",
            "defaults.replicas: has no effect in a fleet; use max_replicas",
        ),
        (
            "models: {m: {repo: org/m, rpc: ['127.0.0.1:50052']}}\nfleet: {}",
            "models.m.rpc: is not possible in a fleet",
        ),
        (MODELS + "fleet: {directory: 'http://head:99999'}", "fleet.directory: is not a valid URL"),
        (FRONT + "default_model: m", "default_model: has no effect with fleet.directory"),
        (FRONT + "downloads: {on_demand: true}", "downloads.on_demand: has no effect with fleet.directory"),
        (FRONT + "peers: {d: {url: 'http://127.0.0.1:1'}}", "peers: has no effect with fleet.directory"),
    ],
)
def test_keys_that_do_not_fit_a_fleet_are_refused(text: str, message: str) -> None:
    assert message in issue_of(text)


def test_what_counts_on_the_nodes_may_not_exist_on_a_front() -> None:
    here = "defaults: {wait_timeout: 300%s}\nfleet: {directory: 'http://head:8000'}\n"
    config = config_of(
        "models: {m: {path: /srv/m.gguf}}\nruntime: /srv/llama-server\n"
        "slots: {disk: 1GiB}\nmemory: {ram: 1GiB}\ndownloads: {token_file: /srv/token}\n"
        + here
        % ", ctx_size: 4096"
    )
    front = without_models(config_of(MODELS + here % ""))
    assert replace(without_models(config), lines={}) == replace(front, lines={})


def test_keys_that_fit_are_accepted() -> None:
    config = config_of(
        "models: {m: {repo: org/m, replicas: 1}}\ndownloads: {on_demand: false}\n"
        "fleet: {directory: 'https://fleet.example.net/a', listen: '[::1]:8000', min_replicas: 1,\n"
        "  models: {m: {max_replicas: 2}, n: {cpus: 1}}}"
    )
    assert is_front(config)
    assert without_models(config).models == {}
    assert without_models(config).of(FLEET) != config.of(FLEET)
    assert not is_front(config_of(MODELS + "fleet: {}"))
    plain = config_of(MODELS)
    assert not is_front(plain)
    assert without_models(plain).of(FLEET) is None
