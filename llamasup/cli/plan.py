"""``llamasup plan``: shows what ``run`` would start, and why. Starts nothing."""

from __future__ import annotations

import json as json_module
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llamasup.cli.errors import show_error
from llamasup.cli.outlet import Outlet
from llamasup.cli.view import TextView, memory_text, table
from llamasup.core.errors import OutputFailed
from llamasup.core.plan import LaunchPlan
from llamasup.core.settings import Settings

if TYPE_CHECKING:
    from llamasup.runtime.launch import Launch

__all__ = ["plan_command"]


def plan_command(model: str, settings: Settings, *, runtime: str | None, json: bool) -> int:
    """Print the plan. Returns the exit code."""
    from llamasup.runtime.launch import prepare

    stderr = Outlet(sys.stderr)
    try:
        launch = prepare(model, settings, runtime=runtime, environ=os.environ)
        with tempfile.TemporaryDirectory(prefix="llamasup-") as folder:
            launch_plan = launch.plan(Path(folder), 1)
        if json:
            text = json_module.dumps(launch.as_json(launch_plan), indent=2)
        else:
            text = _as_text(launch, launch_plan)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - or the interpreter complains at its end
        return 0  # the reader has seen enough (| head)
    except OSError as error:
        return show_error(TextView(stderr), OutputFailed(f"The plan cannot be written: {error.strerror}."))
    except Exception as error:
        return show_error(TextView(stderr), error)
    finally:
        stderr.close()
    return 0


def _as_text(launch: Launch, launch_plan: LaunchPlan) -> str:
    runtime, model, memory = launch.runtime, launch.model, launch_plan.memory
    passed = [each for each in launch_plan.reasons if each.passed]
    left_out = [each for each in launch_plan.reasons if not each.passed]
    environment = [f"{name}={value}" for name, value in sorted(launch_plan.env_shown.items())]
    need, free = memory_text(memory.total_bytes), memory_text(memory.available_bytes)
    sections = [
        f"{launch.model_id}: {model.architecture} {model.model_class}, {model.quantization}",
        f"Runtime: {runtime.path} ({runtime.kind}, {runtime.capabilities.version})",
        "Command line:\n  " + shlex.join(launch_plan.argv),
        "Why:\n" + table([(each.flag, each.value or "", each.reason) for each in passed]),
    ]
    if left_out:
        sections.append(
            "Left out:\n"
            + table(
                [(each.flag, each.value or "", each.reason.removeprefix("left out: ")) for each in left_out]
            )
        )
    sections += [
        "Environment:\n" + "\n".join(f"  {line}" for line in environment),
        f"Memory: {need} needed, {free} free: {'fits' if memory.fits else 'does NOT fit'}\n"
        + table(
            [
                ("weights", memory_text(memory.weights_bytes)),
                ("KV cache", memory_text(memory.kv_bytes)),
                ("compute", memory_text(memory.compute_bytes)),
            ]
        ),
    ]
    return "\n\n".join(sections)
