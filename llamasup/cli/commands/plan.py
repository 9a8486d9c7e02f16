"""Shows the command line that ``run`` would start, with reasons. Starts nothing (``llamasup plan``)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.model import WithExtra
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import stdout_columns, table
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, while_waiting
from llamasup.core.system.text import json_text, memory_text, printable
from llamasup.errors import LlamasupError, ModelMissing

if TYPE_CHECKING:
    from llamasup.core.llama_server.argv_builder import Reason
    from llamasup.core.planning.facts import Launch
    from llamasup.core.planning.ladder import Admission
    from llamasup.core.planning.plan import LaunchPlan


commands = command_set()


@commands.command(cls=WithExtra)
@takes_groups
@guarded
def plan(
    view: View,
    model: o.Model,
    settings: o.ModelSettings,
    runtime: o.RuntimeOption = None,
    json: o.Json = False,
) -> None:
    """Show the llama-server command line for a model, with reasons.

    The command starts nothing.
    """
    from llamasup.core.models.by_name import file_of
    from llamasup.core.planning.facts import prepare
    from llamasup.core.planning.planner import Planner
    from llamasup.core.system.process.run_folder import scratch_folder

    try:
        path = file_of(model)
    except ModelMissing as error:
        raise _of_command(model) or error from None
    with while_waiting(view, "reading the options of the runtime"):
        launch = prepare(path, settings, runtime=runtime, environ=os.environ)
    with scratch_folder() as folder:
        planner = Planner(launch, Path(folder))
        admission = planner.admission(1)
    if json:
        text = json_text(planner.as_json(admission), indent=2)
    else:
        text = _as_text(launch, admission, stdout_columns())
        if (refused := planner.refused(admission)) is not None:
            text += f"\n\nrun refuses this plan with exit code {refused.exit_code}:\n  → {refused.remedy}"
        # A file name may contain control characters, which must not reach the terminal.
        text = "\n".join(map(printable, text.split("\n")))
    write_result(text)


def _of_command(name: str) -> LlamasupError | None:
    """Why a model of the config with a command has no plan. None: the config has no such model."""
    from llamasup.core.config.reading import find_config, read
    from llamasup.features import config_keys

    with suppress(LlamasupError):
        reading, _ = read(find_config(None, os.environ), os.environ, config_keys())
        entry = reading.config.models.get(name)
        return None if entry is None or entry.engine is None else entry.engine.unplanned(name)
    return None


def _as_text(launch: Launch, admission: Admission[LaunchPlan], columns: int | None) -> str:
    runtime, model, plan = launch.runtime, launch.model, admission.plan
    passed = [reason for reason in plan.reasons if reason.passed]
    left_out = [reason for reason in plan.reasons if not reason.passed]
    environment, reasons = sorted(plan.env_shown.items()), plan.env_reasons
    inherited = [f"  {name}={value}" for name, value in environment if name not in reasons]
    explained = [(f"{name}={value}", reasons[name]) for name, value in environment if name in reasons]
    sections = [
        f"{launch.model_id}: {printable(model.architecture)} {model.model_class}, {model.quantization}",
        f"Runtime: {runtime.path} ({runtime.kind}, {runtime.capabilities.version})",
        "Command line:\n  " + shlex.join(plan.argv),
        "Why:\n" + _reasons_table(passed, columns),
    ]
    if left_out:
        sections.append("Left out:\n" + _reasons_table(left_out, columns))
    sections.append("\n".join(["Environment:", *inherited, table(explained, columns=columns)]))
    sections.append(_memory(plan))
    if len(admission.considered) > 1:
        sections.append("Considered:\n" + table(list(map(_alternative, admission.considered))))
    return "\n\n".join(sections)


def _reasons_table(reasons: Sequence[Reason], columns: int | None) -> str:
    rows = [(reason.flag, reason.value or "", reason.reason.removeprefix("left out: ")) for reason in reasons]
    return table(rows, columns=columns)


def _memory(plan: LaunchPlan) -> str:
    from llamasup.core.planning.memory.estimate import memory_rows

    memory = plan.memory
    source = "measured at an earlier load" if memory.measured else "estimated"
    verdict = "fits" if memory.fits else "does NOT fit"
    return f"Memory ({source}): {verdict}\n" + table(memory_rows(memory))


def _alternative(plan: LaunchPlan) -> tuple[str, str, str, str]:
    slots = f"{plan.parallel} × {plan.ctx_size_of_slot} tokens"
    verdict = "fits" if plan.memory.fits else "does not fit"
    return slots, f"KV cache {plan.kv_type}", memory_text(plan.memory.total_bytes), verdict
