"""Smaller plans after a failed start: the fallback steps, their messages, and the load history."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driver import Llamasup, llamasup, run_to_end


def steps(running: Llamasup) -> list[Mapping[str, Any]]:
    return [event["adjustment"] for event in running.events if "adjustment" in event]


def test_out_of_memory_at_load_leads_to_smaller_plans_step_by_step(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    server = fake_server("out_of_memory=host", "above_ctx=5000")
    with llamasup(tiny_model, "--runtime", server) as running:
        running.wait_for("ready")
        assert [(step["step"], step["changes"]) for step in steps(running)] == [
            (1, [{"setting": "--parallel", "before": "4", "after": "1"}]),
            (2, [{"setting": "--ctx-size", "before": "8192", "after": "2048"}]),
        ]
        assert running.stop() == 0
    assert "Restarting with --parallel 1 instead of 4 (step 1 of 3)" in running.stderr_text
    assert "Restarting with --ctx-size 2048 instead of 8192 (step 2 of 3)" in running.stderr_text


def test_successful_plan_is_remembered_and_explained_at_the_next_start(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    server = fake_server("out_of_memory=host", "above_ctx=20000")
    with llamasup(tiny_model, "--runtime", server) as running:
        running.wait_for("ready")
        assert len(steps(running)) == 1
        assert running.stop() == 0
    shown = json.loads(run_to_end("plan", str(tiny_model), "--runtime", server, "--json").stdout)
    (slots,) = [reason for reason in shown["reasons"] if reason["flag"] == "--parallel"]
    assert slots["value"] == "1"
    assert "ran out of memory on 20" in slots["reason"]
    with llamasup(tiny_model, "--runtime", server) as running:
        running.wait_for("ready")
        assert steps(running) == []
        assert running.stop() == 0
    shown = (
        "up to 8,192 tokens a request, 1 at a time, KV cache f16 (adjusted: a larger plan ran out of memory"
    )
    assert f"{shown} on 20" in running.stderr_text


def test_settings_of_the_user_are_not_reduced(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    server = fake_server("out_of_memory=host")
    with llamasup(
        tiny_model, "--runtime", server, "--parallel", "4", "--ctx-size", "8192", "--kv-type", "f16"
    ) as running:
        failed = running.wait_for("exit")
        assert running.end() == 71
    assert "adjustment" not in failed
    assert failed["cause"] == "out_of_memory_host"


def test_at_most_three_fallback_steps_are_tried(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    with llamasup(tiny_model, "--runtime", fake_server("out_of_memory=host")) as running:
        running.wait_for("state", state="failed")
        assert running.end() == 71
    assert 1 < len(steps(running)) <= 3
    assert "out of memory" in running.stderr_text or "too small" in running.stderr_text


def test_crash_of_the_quantized_cache_leads_to_f16(tiny_model: Path, fake_server: Callable[..., str]) -> None:
    server = fake_server("signal=load:SIGSEGV", "packed_kv")
    with llamasup(tiny_model, "--runtime", server, "--profile", "memory") as running:
        running.wait_for("ready")
        assert [step["changes"][0] for step in steps(running)] == [
            {"setting": "--kv-type", "before": "q8_0", "after": "f16"}
        ]
        assert running.stop() == 0


def planned(model: Path, server: str, flag: str, *options: str) -> str | None:
    """The value of ``flag`` on the command line of the plan."""
    shown = json.loads(run_to_end("plan", str(model), "--runtime", server, *options, "--json").stdout)
    return dict(pairwise(shown["argv"])).get(flag)


def run_once(model: Path, server: str, *options: str) -> list[Mapping[str, Any]]:
    with llamasup(model, "--runtime", server, *options) as running:
        running.wait_for("ready")
        assert running.stop() == 0
        return steps(running)


@pytest.mark.parametrize(("phase", "remembered"), [("load", False), ("context", True)])
def test_crash_is_recorded_if_it_follows_the_weights_and_happens_twice(
    tiny_model: Path, fake_server: Callable[..., str], phase: str, remembered: bool
) -> None:
    server = fake_server(f"signal={phase}:SIGSEGV", "packed_kv")
    memory = ("--profile", "memory")
    for _ in range(2):
        assert planned(tiny_model, server, "--cache-type-k", *memory) == "q8_0"
        assert len(run_once(tiny_model, server, *memory)) == 1
    assert (planned(tiny_model, server, "--cache-type-k", *memory) is None) is remembered
    assert len(run_once(tiny_model, server, *memory)) == (0 if remembered else 1)


def test_plan_that_has_served_is_not_recorded_as_failed(
    tiny_model: Path, fake_server: Callable[..., str], tmp_path: Path
) -> None:
    """Two crashes behind the weights, of a plan that generated a token before them."""
    marker = tmp_path / "crashed"
    marker.touch()
    server = fake_server("signal=context:SIGSEGV", f"once={marker}")
    assert run_once(tiny_model, server) == []
    before = planned(tiny_model, server, "--flash-attn")
    for _ in range(2):
        marker.unlink()
        assert len(run_once(tiny_model, server)) == 1
    assert planned(tiny_model, server, "--flash-attn") == before != "off"


def test_fit_warning_of_llama_server_leads_to_a_smaller_plan(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    server = fake_server("fit_warning", "above_ctx=20000", "load_s=60")
    with llamasup(tiny_model, "--runtime", server) as running:
        adjusted = running.wait_for("exit")
        assert adjusted["cause"] == "fit_failed"
        assert adjusted["adjustment"]["changes"][0]["setting"] == "--parallel"
        running.wait_for("state", state="starting", generation=2)
        assert running.stop() == 0


def test_fit_warning_is_only_logged_without_the_memory_check(
    tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    server = fake_server("fit_warning")
    with llamasup(tiny_model, "--runtime", server, "--no-memory-check") as running:
        running.wait_for("ready")
        assert [event["event"] for event in running.events].count("exit") == 0
        assert running.stop() == 0
