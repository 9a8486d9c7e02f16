"""``llamasup tune`` on a real llama-server: what it finds, what it leaves alone, and how it ends."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import psutil
import pytest

from llamasup.cli import stop_signals
from llamasup.cli.output.view import View
from llamasup.cli.stop_signals import Interrupted, StopSignals
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.facts import prepare
from llamasup.core.planning.measured.paired import MIN_PAIRS, Verdict
from llamasup.core.planning.measured.tuned import NO_CHANGES, Changes
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.events import ServerExited, StateChanged
from llamasup.core.supervision.states import State
from llamasup.core.system.storage.fact_cache import FileIdentity
from llamasup.errors import TuningFailed
from llamasup.features.tuning import comparison, search, session, trial
from llamasup.features.tuning.candidates import Candidate, Purpose, default_profile
from llamasup.features.tuning.command import _measure
from llamasup.features.tuning.comparison import Comparison
from llamasup.features.tuning.report import SessionResult
from llamasup.features.tuning.search import begin, begin_proof
from llamasup.features.tuning.trial import Trial
from llamasup.features.tuning.tune import keep, saved_search, tune
from llamasup.features.tuning.workload import Lengths
from tests.e2e.driver import PATIENCE_S, command, is_alive, llamasup, run_to_end
from tests.e2e.service import serving
from tests.kit.children import NewChildren
from tests.kit.gguf_writer import write_gguf
from tests.kit.kept_results import kept_for
from tests.kit.models import tiny_encoder, tiny_reranker
from tests.kit.paths import ROOT
from tests.kit.patience import eventually
from tests.kit.runtimes import shell_command, wrapped_runtime
from tests.kit.tiny import tiny_decoder, tiny_keys, tiny_tensors

Wrap = Callable[[str], str]
Measure = Callable[..., SessionResult]

MICRO = Candidate("micro-batch", Changes((("--ubatch-size", "256"),)), "for the test")
SAME = Candidate("same", Changes((("--sse-ping-interval", "30"),)), "the default of llama-server")
PACKED = Candidate(
    "kv", Changes((("--cache-type-k", "q4_0"), ("--cache-type-v", "q4_0"))), "for the test", lossy=True
)
# With this build, the micro-batch of the plan reads prompts token by token. On a busy machine, two threads
# wait for each other at each token, a hundred times longer than they compute; one only gets its share.
SLOW_DEFAULT = (
    'case " $* " in *" --ubatch-size 512 "*) set -- "$@" --ubatch-size 1;; esac\n'
    'set -- "$@" --threads 1 --threads-batch 1'
)
CRASHES = 'case " $* " in *" --ubatch-size 256 "*) kill -SEGV $$;; esac'
HANGS = 'case " $* " in *" --ubatch-size 256 "*) exec sleep 1000;; esac'


def no_time(*_arguments: object) -> float:
    """In place of ``Session._step_s``: one slow start must not make the rest of the time seem too short."""
    return 0.0


@pytest.fixture
def wrapped_server(llama_server: str, tmp_path: Path) -> Wrap:
    """Makes a build of llama-server that runs a piece of shell script before it becomes the real one."""

    def make(script: str) -> str:
        return wrapped_runtime(tmp_path, llama_server, script)

    return make


class Steps:
    """A clock that stands still for this many measured steps: no test depends on the speed of the machine."""

    def __init__(self, steps: float, say: Callable[[str], None]) -> None:
        self._left = steps
        self._say = say

    def say(self, line: str) -> None:
        self._left -= " pair" in line or line.startswith("proof of")
        self._say(line)

    def __call__(self) -> float:
        return 0.0 if self._left > 0 else 86_400.0


@pytest.fixture
def measure(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Tunes the tiny model (or ``model``) with these candidates, in this process. No wait for a server ends
    before one that hangs would end the test.
    """
    monkeypatch.setattr(session.Session, "_step_s", no_time)
    monkeypatch.setattr(comparison, "_LEAST_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(comparison, "_GRACE_S", PATIENCE_S)

    def run(
        runtime: str,
        candidates: Sequence[Candidate],
        *,
        minutes: float = 0.25,
        steps: float = math.inf,
        purpose: Purpose = "latency",
        model: Path = tiny_model,
        say: Callable[[str], None] = lambda _text: None,
        draft_model: Path | None = None,
        **options: Any,
    ) -> SessionResult:
        draft = None if draft_model is None else str(draft_model)
        settings = Settings(profile=default_profile(purpose), draft_model=draft)
        launch = prepare(str(model), settings, runtime=runtime, environ=os.environ)
        wanted = session.Options(purpose, minutes, runtime, **options)
        clock = Steps(steps, say)
        found = tune(launch, wanted, say=clock.say, search_of=lambda _setup: begin(candidates), clock=clock)
        assert found is not None
        return found

    return run


def plan_of(model: Path, runtime: str, *arguments: str) -> dict[str, Any]:
    done = run_to_end("plan", str(model), "--runtime", runtime, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_planted_slow_flag_is_found_and_used_and_forgotten(
    tiny_model: Path, wrapped_server: Wrap, measure: Measure
) -> None:
    runtime = wrapped_server(SLOW_DEFAULT)
    new_children = NewChildren()
    found = measure(runtime, [MICRO], minutes=1, steps=40, mix=(Lengths(2000, 1),))
    assert found.kept is not None
    assert found.kept.changes == MICRO.changes
    assert found.kept.lower > 1
    assert new_children() == []

    shown = plan_of(tiny_model, runtime)
    why = [one["reason"] for one in shown["reasons"] if one["flag"] == "--ubatch-size"]
    assert why == [found.kept.measured.why]
    assert shown["measured"]["taken"] == {"--ubatch-size": "256"}
    of_user = plan_of(tiny_model, runtime, "--threads", "1")
    assert of_user["measured"] is None  # it was not measured with this setting
    assert plan_of(tiny_model, runtime, "--profile", "latency")["measured"] is None

    listed = run_to_end("tune", str(tiny_model), "--show", "--json")
    assert json.loads(listed.stdout)["results"][0]["taken"] == {"--ubatch-size": "256"}
    assert run_to_end("tune", str(tiny_model), "--forget").returncode == 0
    assert plan_of(tiny_model, runtime)["measured"] is None


def test_the_same_configuration_gets_a_verdict_and_is_taken_only_if_it_won_all_rounds(
    llama_server: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST_ROUNDS", MIN_PAIRS)
    monkeypatch.setattr(session.Session, "_step_s", no_time)
    launch = prepare(str(tiny_model), Settings(), runtime=llama_server, environ=os.environ)
    options = session.Options("latency", 0.25, llama_server, mix=(Lengths(16, 8),))
    found = tune(
        launch,
        options,
        say=lambda _line: None,
        search_of=lambda _setup: begin_proof(SAME),
        clock=lambda: 0.0,
    )
    assert found is not None
    (proof,) = found.search.proofs
    assert len(proof.ratios) == MIN_PAIRS
    won_all = min(proof.ratios) > 0  # one in 512
    assert proof.verdict is (Verdict.BETTER if won_all else Verdict.NOT_BETTER)
    assert found.finished
    assert found.kept is not None
    assert found.kept.changes == (SAME.changes if won_all else NO_CHANGES)


@pytest.mark.one_runtime
def test_a_candidate_that_does_not_start_is_an_answer(
    tiny_model: Path, runtime: str, measure: Measure
) -> None:
    bad = Candidate("bad", Changes((("--cpu-mask", "zz"),)), "no valid mask")
    found = measure(runtime, [bad, SAME], steps=1)
    assert found.search.entries[0].state == "failed"
    assert found.search.entries[1].ratios


def test_a_taken_flag_that_crashes_later_is_left_out_and_forgotten(
    tiny_model: Path, wrapped_server: Wrap, tmp_path: Path
) -> None:
    crashes = tmp_path / "crashes"  # what the build depends on can change: a library, a device
    runtime = wrapped_server(f"if [ -e {crashes} ]; then {CRASHES}; fi")
    launch = prepare(str(tiny_model), Settings(), runtime=runtime, environ=os.environ)
    keep(FileIdentity.of(tiny_model), kept_for(launch, MICRO.changes), lambda _text: None)
    assert plan_of(tiny_model, runtime)["measured"]["taken"] == {"--ubatch-size": "256"}
    crashes.touch()
    with llamasup(tiny_model, "--runtime", runtime) as running:
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert running.stop() == 0
    assert "--ubatch-size 512 instead of 256" in running.stderr_text
    assert plan_of(tiny_model, runtime)["measured"] is None


def test_a_taken_flag_that_hangs_later_is_left_out_and_forgotten(
    tiny_model: Path, wrapped_server: Wrap, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    runtime = wrapped_server(f"if [ -e {hangs} ]; then {HANGS}; fi")
    launch = prepare(str(tiny_model), Settings(), runtime=runtime, environ=os.environ)
    keep(FileIdentity.of(tiny_model), kept_for(launch, MICRO.changes), lambda _text: None)
    assert plan_of(tiny_model, runtime)["measured"]["taken"] == {"--ubatch-size": "256"}
    hangs.touch()

    async def starts() -> ServerExited:
        async with serving(tiny_model, runtime=runtime, stall_timeout_s=8.0) as service:
            exited = await service.exit_of(1)
            await service.wait_for_event(StateChanged, lambda event: event.state is State.READY)
            assert (await service.complete()).status_code == 200
            return exited

    hung = asyncio.run(starts())
    assert hung.diagnosis.cause == "hung_start"
    assert "--ubatch-size 512 instead of 256" in str(hung.diagnosis.adjustment)
    assert plan_of(tiny_model, runtime)["measured"] is None


def test_a_candidate_that_crashes_is_an_answer(wrapped_server: Wrap, measure: Measure) -> None:
    said: list[str] = []
    found = measure(wrapped_server(CRASHES), [MICRO], say=said.append)
    assert found.search.entries[0].state == "failed"
    assert "segmentation fault" in found.search.entries[0].why.casefold()
    assert found.finished
    assert any("--ubatch-size 256" in line for line in said)


@pytest.mark.one_runtime
def test_a_change_that_alters_answers_too_much_is_left_out(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "BOUND", 1e-9)
    assert measure(runtime, [PACKED]).search.entries[0].state == "lossy"
    assert measure(runtime, [PACKED], steps=1, allow_lossy=True).search.entries[0].ratios


def test_drafts_that_are_accepted_wrongly_are_left_out_and_right_ones_are_not(
    llama_server: str, measure: Measure, tmp_path: Path, capabilities: Capabilities
) -> None:
    if not capabilities.knows("--spec-synth-rates"):
        pytest.skip("this build cannot accept drafts wrongly: it has no --spec-synth-rates")
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(write_gguf(tiny_keys(), tiny_tensors(seed="another")))  # most drafts are wrong
    right = Candidate("draft", Changes((("--spec-draft-n-max", "4"),)), "for the test", lossy=True)
    # Accepts each draft, without looking at the target.
    rates = ("--spec-synth-rates", "1.0,1.0,1.0,1.0")
    wrong = Candidate("draft", Changes((*right.changes.flags, rates)), "for the test", lossy=True)
    found = measure(llama_server, [wrong, right], steps=1, draft_model=draft)
    assert found.search.entries[0].state == "lossy"
    assert "nats" in found.search.entries[0].why
    assert found.search.entries[1].ratios


def test_a_draft_model_can_be_left_out(
    llama_server: str, measure: Measure, tiny_model: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(write_gguf(tiny_keys(), tiny_tensors(seed="another")))
    none = Candidate("draft", Changes((("--spec-type", "none"),)), "for the test")
    found = measure(llama_server, [none], steps=1, draft_model=draft)
    assert found.search.entries[0].ratios
    settings = Settings(draft_model=str(draft))
    launch = prepare(str(tiny_model), settings, runtime=llama_server, environ=os.environ)
    keep(FileIdentity.of(tiny_model), kept_for(launch, none.changes), lambda _text: None)
    shown = plan_of(tiny_model, llama_server, "--draft-model", str(draft))
    assert shown["measured"]["taken"] == {"--spec-type": "none"}
    assert str(draft) not in shown["argv"]


@pytest.mark.one_runtime
def test_a_change_that_keeps_the_answers_is_measured(runtime: str, measure: Measure) -> None:
    same = Candidate("same", SAME.changes, "changes nothing", lossy=True)
    assert measure(runtime, [same], steps=1).search.entries[0].ratios


@pytest.mark.one_runtime
def test_if_memory_does_not_hold_both_they_run_one_after_the_other(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Comparison._plan

    def narrow(self: Comparison, changes: Changes) -> tuple[LaunchPlan, bool]:
        made, fits = plan(self, changes)
        return made, fits and self._default is None

    monkeypatch.setattr(Comparison, "_plan", narrow)

    assert measure(runtime, [SAME], steps=1).search.entries[0].ratios


@pytest.mark.one_runtime
def test_if_they_run_one_after_the_other_a_candidate_that_fails_does_not_stay(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, start = Comparison._plan, Comparison._start
    alive: list[int] = []

    def narrow(self: Comparison, changes: Changes) -> tuple[LaunchPlan, bool]:
        made, fits = plan(self, changes)
        return made, fits and self._default is None

    async def counted(self: Comparison, made: LaunchPlan) -> Trial:
        alive.append(sum("--model" in child.cmdline() for child in _servers_of(os.getpid())))
        return await start(self, made)

    monkeypatch.setattr(Comparison, "_plan", narrow)
    monkeypatch.setattr(Comparison, "_start", counted)
    monkeypatch.setattr(comparison, "BOUND", 1e-9)
    found = measure(runtime, [PACKED, SAME], steps=1)
    assert found.search.entries[0].state == "lossy"
    assert found.search.entries[1].ratios
    assert len(alive) >= 3
    assert set(alive) == {0}  # each was started while no other one was alive


def test_a_candidate_that_hangs_at_the_end_of_the_time_gets_no_verdict(
    wrapped_server: Wrap, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    runtime = wrapped_server(HANGS)
    monkeypatch.setattr(session.Session, "_step_s", no_time)

    def say(line: str) -> None:
        said.append(line)
        if line.startswith(SAME.name):
            monkeypatch.setattr(comparison, "_GRACE_S", 0.1)

    def clock() -> float:  # nearly over after the first candidate
        return 59.9 if any(line.startswith(SAME.name) for line in said) else 0.0

    launch = prepare(str(tiny_model), Settings(), runtime=runtime, environ=os.environ)
    options = session.Options("latency", 1, runtime)
    found = tune(launch, options, say=say, search_of=lambda _setup: begin([SAME, MICRO]), clock=clock)
    assert found is not None
    assert not found.finished
    tried, hung = found.search.entries
    assert tried.ratios
    assert (hung.state, hung.ratios) == ("open", ())


@pytest.mark.one_runtime
def test_an_answer_that_is_not_understood_is_named(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(msgspec.Struct):
        words: list[int]

    monkeypatch.setattr(trial, "Tokens", Other)  # so the real answer lacks what is expected
    with pytest.raises(TuningFailed, match="/tokenize gave an answer that is not understood"):
        measure(runtime, [SAME])


@pytest.mark.one_runtime
@pytest.mark.parametrize("write", [tiny_encoder, tiny_reranker])
def test_models_that_generate_no_text_are_measured(
    runtime: str, measure: Measure, write: Callable[[], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(write())
    assert measure(runtime, [SAME], steps=1, model=path).search.entries[0].ratios


@pytest.mark.one_runtime
@pytest.mark.parametrize("purpose", ["throughput", "memory"])
def test_other_purposes_are_measured(runtime: str, measure: Measure, purpose: Purpose) -> None:
    assert measure(runtime, [SAME], steps=1, purpose=purpose).search.entries[0].ratios


@pytest.mark.one_runtime
def test_a_suspended_pair_is_thrown_away(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    suspended = iter([0.0, 60.0])
    monkeypatch.setattr(session, "_suspended_s", lambda: next(suspended, 60.0))
    found = measure(runtime, [SAME], steps=1, say=said.append)
    assert any("suspended" in line for line in said)
    # Measured again, and only that counts. A measurement ends early if it looks hopeless.
    (line,) = (line for line in said if line.startswith(SAME.name))
    assert line.split(" in ")[1].startswith(f"{len(found.search.entries[0].ratios)} pair")


@pytest.mark.one_runtime
def test_a_machine_that_is_suspended_again_and_again_ends_the_tuning(
    runtime: str, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = count(0.0, 60.0)
    monkeypatch.setattr(session, "_suspended_s", lambda: next(suspended))
    monkeypatch.setattr(session, "_MOST_DISCARDED", 2)
    with pytest.raises(TuningFailed, match="suspended during 2 measurements"):
        measure(runtime, [SAME])


def test_a_build_that_is_replaced_while_it_is_measured_ends_the_tuning(
    wrapped_server: Wrap, measure: Measure
) -> None:
    runtime = wrapped_server("")

    def replace_build(line: str) -> None:
        if line.startswith(SAME.name):
            wrapped_server("# another build")

    with pytest.raises(TuningFailed, match="replaced"):
        measure(runtime, [SAME], say=replace_build)


@pytest.mark.one_runtime
@pytest.mark.parametrize("deletes", [False, True])
def test_a_model_that_is_replaced_is_not_tuned_with_what_was_measured_before(
    runtime: str, measure: Measure, tmp_path: Path, *, deletes: bool
) -> None:
    model, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    model.write_bytes(tiny_decoder())
    other.write_bytes(write_gguf(tiny_keys(), tiny_tensors(seed="another")))

    def replace_model(line: str) -> None:
        if line.startswith(SAME.name):
            other.replace(model)
            if deletes:
                model.unlink()

    with pytest.raises(TuningFailed, match="the model file was changed"):
        measure(runtime, [SAME], model=model, say=replace_model)
    assert deletes or saved_search(FileIdentity.of(model)) is None


def test_a_draft_model_that_is_replaced_ends_the_tuning(
    llama_server: str, measure: Measure, tmp_path: Path
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(tiny_decoder())

    def replace_draft(line: str) -> None:
        if line.startswith(SAME.name):
            os.utime(draft, ns=(1, 1))

    with pytest.raises(TuningFailed, match="a draft, projector or adapter file was changed"):
        measure(llama_server, [SAME], draft_model=draft, say=replace_draft)


@pytest.mark.one_runtime
def test_without_time_for_one_comparison_nothing_is_changed(tiny_model: Path, runtime: str) -> None:
    done = run_to_end("tune", str(tiny_model), "--runtime", runtime, "--minutes", "0.0001")
    assert done.returncode == 75
    assert "too short for one comparison" in done.stderr
    assert json.loads(run_to_end("tune", str(tiny_model), "--show", "--json").stdout)["results"] == []


@pytest.mark.one_runtime
def test_ctrl_c_leaves_nothing_behind_and_the_next_call_goes_on(tiny_model: Path, runtime: str) -> None:
    words = command("tune", str(tiny_model), "--runtime", runtime, "--minutes", "1")
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        first = next(line for line in running.stderr if "in 3 pairs" in line)
        second = run_to_end("tune", str(tiny_model), "--runtime", runtime)
        assert second.returncode == 75
        assert "is being tuned by another llamasup" in second.stderr
        servers = psutil.Process(running.pid).children(recursive=True)
        assert servers
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
        assert running.wait(PATIENCE_S) == 130
    finally:
        running.kill()
        running.wait()
        running.stderr.close()
    assert "Stopped" in rest
    eventually(lambda: not any(map(is_alive, servers)), "the end of all servers")
    more = run_to_end("tune", str(tiny_model), "--runtime", runtime, "--minutes", "0.05")
    assert more.returncode == 0, more.stderr
    assert "continuing the search that an earlier call began" in more.stderr
    assert first.partition(":")[0] not in more.stderr.partition("\n")[2].splitlines()[0]


def test_a_second_stop_kills_servers_that_do_not_end(
    wrapped_server: Wrap, llama_server: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shell ignores SIGTERM, and waits for the real server.
    runtime = wrapped_server(f"trap '' TERM\n{shell_command(llama_server)} \"$@\" & wait $!\nexit")
    monkeypatch.setattr(trial, "_END_S", math.inf)  # so only the second stop ends the test
    stops: list[Callable[[], None]] = []
    end = Trial.end

    async def stopped_again(self: Trial) -> None:
        stops[0]()
        await end(self)

    monkeypatch.setattr(Trial, "end", stopped_again)
    new_children = NewChildren()
    launch = prepare(str(tiny_model), Settings(), runtime=runtime, environ=os.environ)
    options = session.Options("latency", 1, runtime)
    assert tune(launch, options, say=lambda _line: stops[0](), on_stop=stops.append) is None
    assert new_children() == []
    stops[0]()  # after the end it does nothing


def test_after_the_measurement_a_signal_raises_again(
    llama_server: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = StopSignals()
    monkeypatch.setattr(stop_signals, "STOP_SIGNALS", signals)
    launch = prepare(str(tiny_model), Settings(), runtime=llama_server, environ=os.environ)

    class SignalAtFirstLine:
        def say(self, _level: str, _source: str, line: str) -> None:
            if line.startswith("default: "):
                signals._handle(signal.SIGINT, None)

    view = cast("View", SignalAtFirstLine())
    assert _measure(view, launch, session.Options("latency", 1, llama_server), None) == 130
    with pytest.raises(Interrupted):
        signals._handle(signal.SIGINT, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.one_runtime
def test_a_tuning_gives_way_to_the_requests_of_a_running_llamasup(tiny_model: Path, runtime: str) -> None:
    options = ("--parallel", "1", "--ctx-size", "32768")  # so that the answer takes seconds
    with llamasup(tiny_model, "--runtime", runtime, *options) as serving:
        url = f"{serving.url}/completion"
        words = command("tune", str(tiny_model), "--runtime", runtime, "--minutes", "3")
        running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert running.stderr is not None
        try:
            next(line for line in running.stderr if "in 3 pairs" in line)
            listed = json.loads(run_to_end("status", "--json").stdout)
            assert listed["pid"] == serving.pid  # the tuning is no llamasup that could be controlled
            body = {"prompt": "Once", "n_predict": 32_000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", url, json=body) as answer:
                chunks = answer.iter_bytes()
                next(chunks)
                line = next(line for line in running.stderr if "giving way" in line)
                assert "later" in line
                eventually(lambda: not _servers_of(running.pid), "the end of the servers under measurement")
                next(chunks)
            next(line for line in running.stderr if "min left" in line)  # it goes on
        finally:
            running.send_signal(signal.SIGINT)
            running.stderr.read()
            running.wait(PATIENCE_S)
            running.stderr.close()


def _servers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if is_alive(child)]


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG and the guardian")
@pytest.mark.one_runtime
def test_a_killed_tuning_leaves_no_server(tiny_model: Path, runtime: str) -> None:
    words = command("tune", str(tiny_model), "--runtime", runtime, "--minutes", "1")
    running = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    with running.stderr:
        next(line for line in running.stderr if line.startswith("default"))
        servers = psutil.Process(running.pid).children(recursive=True)
        running.kill()
        running.wait()
    assert servers
    eventually(lambda: not any(map(is_alive, servers)), "the end of all servers")


def test_the_measurements_can_be_repeated(llama_server: str) -> None:
    words = [sys.executable, "-m", "scripts.bench", "tune", "--quick", "--runtime", llama_server]
    done = subprocess.run(  # four tunings
        words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=4 * PATIENCE_S
    )
    written = done.stdout
    assert "| dense, F32, 0.7 MB |" in written
    assert "0 of 1 tunings of a candidate that changes nothing finished a proof; 0 took it." in written
