"""Reports the events and requests of a service on standard error, one line each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict

from llamasup.cli.output.error_report import error_text
from llamasup.cli.output.layout import table
from llamasup.cli.output.rate_limit import RequestLineLimit, is_routine
from llamasup.cli.output.view import Level, View, duration_text, plural, shortened
from llamasup.core.llama_server.rpc.find import FoundWorker
from llamasup.core.models.spec import Changes
from llamasup.core.observability.access_record import shown_path
from llamasup.core.observability.counters import RequestRecord
from llamasup.core.planning.facts import Launch
from llamasup.core.planning.plan import LaunchPlan
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.supervision.events import (
    ConfigRejected,
    Downloading,
    LoadFailed,
    LoadProgressed,
    ModelsChanged,
    ModelUnloading,
    PublishedEvent,
    Ready,
    ServerExited,
    ServerWarned,
    StateChanged,
    Stopped,
)
from llamasup.core.supervision.load_progress import LoadProgress
from llamasup.core.supervision.plan_protocol import ChildPlan, WorkerPlan
from llamasup.core.supervision.states import State
from llamasup.core.system.text import memory_text, printable

if TYPE_CHECKING:
    from llamasup.service.hosting import Service
    from llamasup.service.rpc_worker import RpcWorker

_ACTIVITIES = {
    State.STARTING: "starting {program} for {model}",
    State.LOADING: "loading {model}",
    State.WARMING: "warming up {model}: waiting for its first token",
    State.DRAINING: "finishing the requests in flight",
    State.STOPPING: "stopping {program}",
    State.BACKOFF: "waiting before the next start of {model}",
}

_COMMAND_ACTIVITIES = {
    "load": "loading",
    "unload": "unloading",
    "restart": "restarting",
    "reload": "restarting",
    "pull": "downloading",
    "rm": "removing",
    "upgrade": "reading the new build of",
}

_EVICTION_REASONS = {
    "memory": "{other} needs its memory",
    "group": "{other} is in the same group",
    "count": "{other} is loaded instead",
}
_UNLOAD_REASONS = {
    "ttl": "its TTL has expired",
    "asked": "on request",
    "changed": "its file or settings have changed",
    "removed": "it is no longer served",
}


class RequestLine(Struct, frozen=True):
    """The line of a finished request, whose text is made in the writer's thread."""

    record: RequestRecord
    with_model: bool
    with_id: bool

    def text(self) -> str:
        record = self.record
        parts = (
            record.method,
            shown_path(record.path),
            record.model if self.with_model else "",
            record.client.removeprefix("key:") if record.cause else "",
            str(record.status),
            _tokens(record),
            f"{record.tokens_per_s:.1f} tok/s" if record.tokens_per_s else "",
            duration_text(record.duration_s),
        )
        outcome = _outcome(record)
        if record.context:
            outcome += f" ({_context(record)})"
        if record.replayed:
            outcome += " (sent again)"
        if self.with_id:
            outcome += f" [{record.request_id}]"
        return "  ".join(part for part in parts if part) + outcome

    def fields(self) -> dict[str, Any]:
        return {**asdict(self.record), "path": shown_path(self.record.path)}


class ConsoleReporter:
    """Writes lines about one service, started at ``began_s`` (monotonic), to ``view``."""

    def __init__(
        self, view: View, service: Service | RpcWorker, began_s: float, *, at_terminal: bool = False
    ) -> None:
        self._view = view
        self._at_terminal = at_terminal  # a person at a terminal reads the lines
        self._service = service
        self._began_s = began_s
        self._stop_requests = 0
        self._activities: dict[str, str] = {}  # by model; the live line shows the last one
        self._line_limit = RequestLineLimit(view)

    def stop_requested(self, reason: str, *, time_limit_s: float | None = None) -> None:
        """Report a stop. ``reason``: such as a signal's name; ``time_limit_s``: of requests in flight."""
        self._stop_requests += 1
        if self._stop_requests == 1:
            in_flight = self._service.in_flight
            limit = (
                "; repeat to stop now" if time_limit_s is None else f" within {duration_text(time_limit_s)}"
            )
            waiting = f" {plural(in_flight, 'request')} in flight may finish{limit}." if in_flight else ""
            self._view.say("info", "stop", f"{reason}: stopping.{waiting}", in_flight=in_flight)
        else:
            self._view.say("warning", "kill", f"{reason} again: stopping now.")

    def reload_requested(self, signal_name: str) -> None:
        activity = "reading the config again" if self._has_many else "restarting the model"
        self._view.say("info", "restart", f"{signal_name}: {activity}.")

    def command(self, command: str, model: str) -> None:
        """Report a command of the control API. Its effects have their own lines."""
        is_config = command == "reload" and self._has_many
        what = model or "llama.cpp"  # an upgrade concerns all models
        activity = "reading the config again" if is_config else f"{_COMMAND_ACTIVITIES[command]} {what}"
        self._view.say("info", command, f"llamasup {command}: {activity}.")

    def on_event(self, event: PublishedEvent) -> None:
        match event:
            case StateChanged(model, state, generation):
                self._state_changed(model, state, generation)
            case LoadProgressed(model, _, progress):
                self._load_progressed(model, progress)
            case ServerExited():
                self._server_exited(event)
            case ServerWarned(model, generation, message, remedy):
                text = error_text(message, remedy)
                self._view.say("warning", "warning", text, model=model, generation=generation, remedy=remedy)
            case ModelUnloading(model, reason, for_model):
                text = f"{model} is unloaded: {_unload_reason(reason, for_model)}"
                level: Level = "debug" if self._stop_requests else "info"
                self._view.say(level, "unload", text, model=model, reason=reason)
            case LoadFailed(str() as model, error):
                self._set_activity(model, None)
                if event.follows_exit:
                    return
                message = error.message if model in error.message else f"{model}: {error.message}"
                text = error_text(message, error.remedy, error.lines, error.details)
                self._view.say("warning", "failed", text, model=model, cause=error.cause)
            case Downloading():
                self._downloading(event)
            case ModelsChanged(changes, _):
                self._models_changed(changes)
            case ConfigRejected(error):
                message = f"{error.message} The previous configuration stays in use."
                text = error_text(message, error.remedy, error.lines, error.details)
                self._view.say("error", "config", text, cause=error.cause)
            case Ready():
                self._ready(event)
            case Stopped():
                self._line_limit.close()
                self._view.show_activity(None)
                self._view.say("info", "stopped", "stopped")

    def request(self, record: RequestRecord) -> None:
        level: Level = "debug" if is_routine(record) else "warning" if record.status >= 500 else "info"
        if self._view.shows(level) and self._line_limit.shows(record):
            line = RequestLine(record, with_model=self._has_many, with_id=level == "warning")
            self._view.say_later(level, "request", line)

    def slow_request(self, record: RequestRecord, left_out: int) -> None:
        """Report a slow request. ``left_out``: how many others had no line since the last one."""
        path = shown_path(record.path)
        text = f"slow: {record.method} {path}: {_time_spent(record)} [{record.request_id}]"
        self._view.say(
            "warning",
            "slow_request",
            text + (f" ({left_out} more since the last such line)" if left_out else ""),
            left_out=left_out,
            **{**asdict(record), "path": path},
        )

    def _state_changed(self, model: str, state: State, generation: int) -> None:
        activity = _ACTIVITIES.get(state)
        program = "rpc-server" if isinstance(self._service.launch, FoundWorker) else "llama-server"
        shown = None if activity is None else activity.format(model=model, program=program)
        self._set_activity(model, shown)
        level: Level = "debug"
        text = f"{model} is {state}"
        if state is State.READY and (generation > 1 or self._has_many):
            level = "info"
            text = f"{model} is ready again" if generation > 1 else f"{model} is ready"
            text += self._serving_facts(model)
        self._view.say(level, "state", text, model=model, state=state, generation=generation)

    def _load_progressed(self, model: str, progress: LoadProgress) -> None:
        if model in self._activities:
            left = progress_text(progress.percent, progress.eta_s)
            why = "" if progress.reason is None else f" ({progress.reason})"
            self._set_activity(model, f"loading {model}: {left}{why}")

    def _set_activity(self, model: str, activity: str | None) -> None:
        self._activities.pop(model, None)
        if activity is not None:
            self._activities[model] = activity
        self._view.show_activity(next(reversed(self._activities.values()), None))

    def _downloading(self, event: Downloading) -> None:
        model, total = event.model, event.total_bytes
        if not self._activities.get(model, "").startswith("downloading"):
            size = "" if total is None else f" ({memory_text(total)})"
            self._view.say("info", "download", f"downloading {model}{size}", model=model)
        share = f" of {memory_text(total)} ({event.done_bytes / total:.0%})" if total else ""
        speed = f", {memory_text(event.bytes_per_s)}/s" if event.bytes_per_s else ""
        self._set_activity(model, f"downloading {model}: {memory_text(event.done_bytes)}{share}{speed}")

    def _serving_facts(self, model: str) -> str:
        """Describe one of many models: its processes, load time, device and slots."""
        hosted = None if self._service.launch is not None else self._service.hosted_models
        runners = [] if hosted is None else hosted.runners_of(model)
        facts = []
        if len(runners) > 1:
            serving = sum(runner.instance.state is State.READY for runner in runners)
            facts.append(f"{serving} of {len(runners)} processes")
        if runners:
            plan, load_s = runners[0].plan, runners[0].load_s
            if load_s is not None:
                facts.append(f"loaded in {duration_text(load_s)}")
            if isinstance(plan, LaunchPlan):
                if plan.device:
                    facts.append(plan.device)
                facts.append(_reach(plan))
        return f" ({', '.join(facts)})" if facts else ""

    def _server_exited(self, exited: ServerExited) -> None:
        diagnosis = exited.diagnosis
        prefix = f"{exited.model}: " if self._has_many else ""
        if exited.restart_in_s is None:
            if self._has_many:
                text = error_text(f"{prefix}{diagnosis.message}", diagnosis.remedy, diagnosis.lines)
                self._view.say("warning", "exit", text, model=exited.model, cause=diagnosis.cause)
            return  # for one model, the error that ends the service has the same diagnosis
        again = "now" if exited.restart_in_s == 0 else f"in {duration_text(exited.restart_in_s)}"
        next_start, remedy = f"Restarting {again}.", diagnosis.remedy
        if diagnosis.adjustment is not None:  # it replaces the remedy
            next_start, remedy = f"Restarting with {diagnosis.adjustment}.", ""
        self._view.say(
            "warning",
            "exit",
            error_text(f"{prefix}{diagnosis.message} {next_start}", remedy, diagnosis.lines),
            model=exited.model,
            generation=exited.generation,
            code=exited.exit.code if exited.exit else None,
            signal=exited.exit.signal if exited.exit else None,
            cause=diagnosis.cause,
            remedy=diagnosis.remedy,
            restart_in_s=exited.restart_in_s,
        )

    def _ready(self, ready: Ready) -> None:
        took_s = time.monotonic() - self._began_s
        runner = self._service.runner
        plan = runner.plan if runner else None
        name = "llamasup" if self._has_many else ", ".join(ready.models)
        lines = [f"{name} is ready at {ready.address.shown} after {duration_text(took_s)}"]
        if ready.ollama is not None:
            lines.append(f"Ollama's API is at {ready.ollama.shown}")
        if plan is not None:
            lines.append(table(self._facts(plan)))
        elif self._has_many:
            lines.append(table(self._facts_of_many()))
            if not self._activities:
                self._view.show_activity(None)
        self._view.say(
            "info",
            "ready",
            "\n".join(lines),
            url=ready.address.url,
            models=list(ready.models),
            took_s=round(took_s, 3),
        )

    @property
    def _has_many(self) -> bool:
        return self._service.launch is None

    def _models_changed(self, changes: Changes) -> None:
        parts = [
            f"{len(ids)} {change}: {shortened(ids)}"
            for change, ids in (
                ("new", changes.new),
                ("removed", changes.gone),
                ("renamed", [f"{old} to {new}" for old, new in changes.renamed]),
                ("changed", (*changes.changed, *changes.retouched)),
            )
            if ids
        ]
        if parts or not changes.settings:
            self._view.say("info", "models", f"Models: {'; '.join(parts) or 'no changes'}.")
        if changes.settings:
            text = f"Config reloaded: {', '.join(changes.settings)} changed."
            self._view.say("info", "config", text)

    def _facts_of_many(self) -> list[tuple[str, str]]:
        hosted = self._service.hosted_models if self._service.launch is None else None
        if hosted is None:
            return []
        specs = hosted.registry.specs
        served = [id_ for id_, spec in specs.items() if not spec.problem]
        broken = [id_ for id_, spec in specs.items() if spec.problem and not spec.unlisted]
        left_out = sum(spec.unlisted for spec in specs.values())
        loaded = [
            id_
            for id_ in served
            if any(runner.instance.state is State.READY for runner in hosted.runners_of(id_))
        ]
        if served:
            models = f"{len(served)}: {shortened(served)}"
        elif hosted.has_other_nodes:
            models = "those of other nodes"
        else:
            models = "none yet: put .gguf files into the folder"
        facts = [("models", models)]
        if served:
            facts.append(("loaded", shortened(loaded) or "none yet: a request loads the model that it names"))
        if broken:
            facts.append(("broken", f"{shortened(broken)} (llamasup status --all shows why)"))
        facts += [("one process", " and ".join(spec.shares)) for spec in specs.values() if spec.shares]
        if left_out:
            files = "file" if left_out == 1 else "files"
            facts.append(("left out", f"{left_out} {files} (llamasup status --all shows why)"))
        if hosted.registry.default is not None:
            facts.append(("default", f"{hosted.registry.default}, for requests that name no model"))
        memories = (f"{memory_text(size)} of {name.upper()}" for name, size in hosted.budget.items())
        facts.append(("memory", ", ".join(memories)))
        return facts

    def _facts(self, plan: ChildPlan) -> list[tuple[str, str]]:
        launch, runner = self._service.launch, self._service.runner
        facts: list[tuple[str, str]] = []
        if launch is None:
            return []
        if isinstance(launch, FoundWorker):
            facts = [("server", launch.path)]
            if isinstance(plan, WorkerPlan):
                limit = plan.limit_bytes
                offers = "all memory of its devices" if limit is None else memory_text(limit)
                facts.append(("offers", offers))
        elif not isinstance(launch, Launch):
            facts = [("server", launch.shown)]
        elif isinstance(plan, LaunchPlan):
            facts = _facts_of_model(launch, plan)
        if self._at_terminal and isinstance(plan, LaunchPlan):
            facts.append(("chat", "llamasup chat in another terminal, llamasup ui in a browser"))
        if runner is not None and runner.pid is not None:
            from llamasup.core.system.hardware.probe import load_usage

            usage = load_usage(runner.pid)
            if usage is not None:
                facts.append(("memory", f"{memory_text(usage.rss_bytes)} in use"))
        return facts


def _unload_reason(reason: str, for_model: str) -> str:
    if reason in _UNLOAD_REASONS:
        return _UNLOAD_REASONS[reason]
    return _EVICTION_REASONS[reason].format(other=for_model) if for_model else "a limit was lowered"


def _facts_of_model(launch: Launch, plan: LaunchPlan) -> list[tuple[str, str]]:
    runtime = launch.runtime
    devices = ", ".join(device.description for device in runtime.capabilities.devices) or "CPU"
    if plan.workers:
        devices += f", and the RPC workers {', '.join(plan.workers)}"
    adjusted = f" (adjusted: {plan.bounds.why})" if plan.bounds.why else ""
    return [
        (
            "model",
            f"{launch.model_path} ({printable(launch.model.architecture)}, {launch.model.quantization})",
        ),
        ("server", f"{runtime.path if runtime.kind == 'binary' else runtime.kind} ({runtime.version})"),
        ("slots", f"{_reach(plan)}, KV cache {plan.kv_type}{adjusted}"),
        ("device", devices),
    ]


def _reach(plan: LaunchPlan) -> str:
    return f"up to {plan.ctx_size:,} tokens a request, {plan.parallel} at a time"


def _outcome(record: RequestRecord) -> str:
    """Say what became of a request that was not simply answered, and why: `` (refused: queue full)``."""
    if record.outcome in ("ok", "local"):
        return ""
    cause = record.cause.replace("_", " ")
    if record.outcome == "revoked":
        ended = "llamasup stopped" if record.cause == "stopping" else cause
        return f" (aborted{f': {ended}' if ended else ''})"
    return f" ({record.outcome.replace('_', ' ')}{f': {cause}' if cause else ''})"


def _tokens(record: RequestRecord) -> str:
    return (
        f"{record.tokens_prompt or 0}+{record.tokens_completion} tokens" if record.tokens_completion else ""
    )


def _context(record: RequestRecord) -> str:
    match record.context:
        case "exceeded" if record.n_prompt_tokens and record.n_ctx:
            return f"context exceeded: {record.n_prompt_tokens:,} of {record.n_ctx:,} tokens"
        case "exceeded":
            return "context exceeded"
        case "cut":
            return "stopped at the end of the context" + (
                f", {record.n_ctx:,} tokens" if record.n_ctx else ""
            )
        case _:
            return "context shifted: the oldest tokens were dropped"


def _time_spent(record: RequestRecord) -> str:
    """The time in the queue, for the model and in llama-server, and the total."""
    queue = f"{duration_text(record.queue_s)} in the queue"
    if record.waited_s:
        queue += f" ({duration_text(record.waited_s)} waiting for the model)"
    if record.first_byte_s is None:
        return f"no answer in {duration_text(record.duration_s)}, {queue}"
    served_s = record.first_byte_s - record.queue_s
    parts = [
        f"{duration_text(record.first_byte_s)} to the first byte",
        f"{queue} and {duration_text(served_s)} in llama-server",
        f"{duration_text(record.duration_s)} in total",
        _tokens(record),
    ]
    return ", ".join(part for part in parts if part)
