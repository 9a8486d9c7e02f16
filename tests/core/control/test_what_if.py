"""Plans of a served model with other settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.control import what_if
from llamasup.core.control.what_if import Planned, asked_settings, plan_with
from llamasup.core.models.registry import with_options
from llamasup.core.models.spec import Stay
from llamasup.core.planning.facts import Launch
from llamasup.core.pool.estimate import prepare_listed
from llamasup.core.settings.model import ModelSettings
from llamasup.errors import DoesNotFit, LlamasupError, UsageInvalid
from tests.core.pool.pools import file_of, server, spec_of

MANY = {"ram": 1 << 50}


class Asked:
    def __init__(self, folder: Path, tiny_model: Path) -> None:
        self.runtime = str(server(folder))
        spec = spec_of(file_of(folder, "tiny", tiny_model))
        self.spec = with_options(spec, ModelSettings(ctx_size=512, parallel=1))

    def launch(self) -> Launch:
        return prepare_listed(self.spec, runtime=self.runtime, environ=os.environ)

    def plan(
        self, launch: Launch | None = None, budget: Mapping[str, int] = MANY, **settings: Any
    ) -> Planned:
        asked = asked_settings(settings)
        return plan_with(self.spec, launch, asked, budget, self.runtime, os.environ)


@pytest.fixture
def it(tmp_path: Path, tiny_model: Path) -> Asked:
    return Asked(tmp_path, tiny_model)


def flag(planned: Planned, name: str) -> str:
    argv = planned.shown["argv"]
    return str(argv[argv.index(name) + 1])


def test_plan_has_the_settings_of_the_model_and_the_other_ones(it: Asked) -> None:
    planned = it.plan(kv_type="q8_0")
    assert (flag(planned, "--ctx-size"), flag(planned, "--cache-type-k")) == ("512", "q8_0")
    assert planned.needs["ram"] == planned.shown["memory"]["total_bytes"] > 0
    assert planned.refused is None


def test_known_facts_give_the_same_plan_without_reading_again(
    it: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = it.launch()
    read = it.plan(ctx_size=1024)
    monkeypatch.setattr(what_if, "prepare_listed", None)
    assert it.plan(launch, ctx_size=1024) == read


@pytest.mark.parametrize("settings", [{"extra": ["--prio", "1"]}, {"replicas": 2}])
def test_settings_that_name_files_or_flags_are_read_again(it: Asked, settings: dict[str, Any]) -> None:
    assert it.plan(it.launch(), **settings) == it.plan(None, **settings)


def test_replicas_need_their_memory_each(it: Asked) -> None:
    assert it.plan(replicas=3).needs["ram"] == 3 * it.plan(replicas=1).needs["ram"]


def test_plan_that_cannot_fit_says_why(it: Asked) -> None:
    planned = it.plan(budget={"ram": 1 << 20}, ctx_size=512)
    assert isinstance(planned.refused, DoesNotFit)
    assert planned.shown["memory"]["fits"] is False


def test_model_of_run_keeps_the_settings_of_its_command_line(it: Asked) -> None:
    launch = it.launch()
    launch = replace(launch, settings=replace(launch.settings, threads=1))
    it.spec = replace(it.spec, settings=replace(it.spec.settings, ctx_size=None), stay=Stay(by_command=True))
    planned = it.plan(launch, kv_type="q8_0")
    assert (flag(planned, "--threads"), flag(planned, "--ctx-size")) == ("1", "512")


def test_missing_file_is_reported(it: Asked, tmp_path: Path) -> None:
    it.spec = replace(it.spec, source=str(tmp_path / "missing.gguf"))
    with pytest.raises(LlamasupError):
        it.plan()


def test_settings_are_written_as_in_a_config() -> None:
    assert asked_settings({"ctx_size": 4096, "ttl": "10m"}) == ModelSettings(ctx_size=4096, ttl_s=600.0)
    assert asked_settings({}) == ModelSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ctx_sise": 1}, "ctx_size"),
        ({"ctx_size": "many"}, "ctx_size"),
        ({"ctx_size": -1}, "ctx_size"),
        ({"path": "/etc/passwd"}, "path"),
        ({"<script>": 1}, "<script>"),
        ({"ctx_size": {"a": []}}, "ctx_size"),
        ({"ctx_size": None}, "ctx_size"),
    ],
)
def test_invalid_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageInvalid, match=message) as raised:
        asked_settings(given)
    assert re.search(r"[^.?][.?]$", raised.value.message)


def test_several_invalid_settings_are_listed() -> None:
    with pytest.raises(UsageInvalid) as raised:
        asked_settings({"ctx_sise": 1, "parallel": "x"})
    assert raised.value.message == "2 invalid settings:"
    assert len(raised.value.details) == 2


def test_deeply_nested_settings_are_refused() -> None:
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(UsageInvalid):
        asked_settings({"extra": nested})
