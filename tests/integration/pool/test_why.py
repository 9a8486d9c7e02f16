"""The decisions that a pool with fake servers records, and its explanations of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamasup.core.models.spec import Stay
from llamasup.core.pool.catalog.collect import why_of
from llamasup.core.pool.eviction_policy import Phase, ResidencyPolicy
from llamasup.core.supervision.backoff import RestartPolicy
from llamasup.core.supervision.states import Policy, State
from tests.core.pool.pools import Pooled, async_test, file_of, pooled, server, spec_of

LATE = Policy(restart=RestartPolicy(first_delay_s=1000.0, longest_delay_s=1000.0), wait_timeout_s=2000.0)


def why(it: Pooled, model: str) -> dict[str, Any]:
    return dict(why_of(it[model], it.pool))


def kinds(it: Pooled, model: str) -> Sequence[str]:
    """The oldest first."""
    return [decision.kind for decision in reversed(it.pool.decisions.of(model))]


@async_test
async def test_idle_model_is_evicted_for_a_requested_one(tmp_path: Path, tiny_model: Path) -> None:
    specs = [spec_of(file_of(tmp_path, name, tiny_model)) for name in "ab"]
    async with pooled(tmp_path, *specs, capacity=1.5) as it:
        await it.load("a")
        it.ask("b")
        await it.until_phase("b", Phase.RESIDENT)

        assert "a command asked for it" in it.pool.decisions.of("a")[-1].text
        assert kinds(it, "a") == ["load", "evict"]
        assert kinds(it, "b") == ["wait", "load"]
        evicted, loaded = why(it, "a"), why(it, "b")
        assert (evicted["state"], loaded["state"]) == ("stopped", "ready")
        assert "because b needs" in evicted["sentences"][1]
        assert "because a request asked for it" in loaded["sentences"][0]
        assert [each["kind"] for each in evicted["decisions"]] == ["evict", "load"]


@async_test
async def test_model_in_use_lets_another_one_wait_and_is_closed_then(
    tmp_path: Path, tiny_model: Path
) -> None:
    specs = [spec_of(file_of(tmp_path, name, tiny_model)) for name in "ab"]
    residency = ResidencyPolicy(time_slice_s=0.2)
    async with pooled(tmp_path, *specs, capacity=1.5, residency=residency) as it:
        using = it.ask("a")
        await using.served_by()
        it.ask("b")
        await it.until(lambda: it["b"].waits is not None)
        waiting = why(it, "b")
        assert waiting["state"] == "waiting"
        assert "and waits because it needs" in waiting["sentences"][0]

        await it.until_phase("a", Phase.CORDONED)
        assert "gets no new requests because b needs" in why(it, "a")["sentences"][0]
        using.finish()
        await it.until_phase("b", Phase.RESIDENT)
        assert kinds(it, "a") == ["load", "drain", "evict"]
        assert it["b"].waits is None


@async_test
async def test_model_that_can_never_fit_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    pinned = spec_of(file_of(tmp_path, "a", tiny_model), stay=Stay(pin=True))
    async with pooled(tmp_path, pinned, spec_of(file_of(tmp_path, "b", tiny_model)), capacity=1.5) as it:
        await it.load("a")
        await it.ask("b").refusal()

        assert kinds(it, "b") == ["refuse"]
        refused = why(it, "b")
        assert refused["state"] == "failed"
        assert "of which pinned models hold" in refused["sentences"][0]
        assert "pin fewer models" in refused["change"][0]
        assert why(it, "a")["sentences"][1].startswith("It is pinned")


@async_test
async def test_crash_is_the_reason_of_a_restart(tmp_path: Path, tiny_model: Path) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model))
    runtime = server(tmp_path, {"a.gguf": ["exit=load:1"]})
    async with pooled(tmp_path, spec, runtime=runtime, policy=LATE) as it:
        it.ask("a")
        await it.until(lambda: any(each.instance.state is State.BACKOFF for each in it["a"].runners))

        crashed = why(it, "a")
        assert crashed["state"] == "backoff"
        assert crashed["sentences"][0].startswith("The llama-server of a ended just now: ")
        assert "a starts again in " in crashed["sentences"][1]
        assert kinds(it, "a") == ["load", "restart"]


@async_test
async def test_renamed_model_keeps_its_decisions(tmp_path: Path, tiny_model: Path) -> None:
    spec = spec_of(file_of(tmp_path, "a", tiny_model))
    async with pooled(tmp_path, spec) as it:
        await it.load("a")
        it.pool.rename(it["a"], "z")
        assert [decision.model for decision in it.pool.decisions.last()] == ["z"]
        assert it.pool.decisions.of("z")[0].kind == "load"


@async_test
async def test_update_of_a_loaded_model_is_recorded_once(tmp_path: Path, tiny_model: Path) -> None:
    path = file_of(tmp_path, "a", tiny_model)
    async with pooled(tmp_path, spec_of(path)) as it:
        await it.load("a")
        it.apply(spec_of(path, ctx_size=256))
        await it.until(lambda: it.loads("a") == 2)
        assert kinds(it, "a") == ["load", "update"]
