"""Plans a served model with other settings, or another file (docs/control.md). Starts nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs
from msgspec.structs import replace

from llamasup.core.config.issues import ConfigIssues
from llamasup.core.config.reading import read_text
from llamasup.core.models.registry import with_options
from llamasup.core.models.spec import ModelSpec
from llamasup.core.planning.facts import Launch
from llamasup.core.pool.estimate import admissions, prepare_listed
from llamasup.core.settings.declaration import settings_of
from llamasup.core.settings.model import ModelSettings
from llamasup.errors import LlamasupError, NotAllowed, UsageInvalid

_NAME = "model"
# With these, the files and the flags have to be read again.
_READ_AGAIN = ("mmproj", "draft_model", "extra", "loras", "devices", "replicas")
_AS_READ = ("mmproj", "draft_model", "alias", "extra")


class Planned(Struct, frozen=True):
    """The plan of a model.

    ``shown``: the JSON of ``llamasup plan --json``. ``needs``: bytes by device, of all replicas.
    ``refused``: why it could not be started even alone.
    """

    shown: Mapping[str, Any]
    needs: Mapping[str, int]
    refused: LlamasupError | None


def refuse_hosts(given: Mapping[str, Any]) -> None:
    """Raises NotAllowed for settings that name hosts: a plan connects to them, and says what answers."""
    for key, (_, setting) in settings_of(ModelSettings).items():
        if key in given and setting.outside == "host":
            raise NotAllowed(
                f"{key} names hosts, to which a plan for a client may not connect.",
                remedy="Use `llamasup plan` on that machine.",
            )


def asked_settings(given: Mapping[str, Any]) -> ModelSettings:
    """The keys of a model, written and checked as in a config. Raises UsageInvalid."""
    try:
        content = json.dumps({"defaults": dict(given), "models_dir": "/"}).encode()
        reading, issues = read_text(content, "settings", Path("/"), {}, ())
    except (ConfigIssues, ValueError, RecursionError) as error:
        raise UsageInvalid(_sentence(f"The settings cannot be read: {error}")) from None
    if issues:
        what = tuple(f"{issue.key.removeprefix('defaults.')}: {issue.what}" for issue in issues)
        raise UsageInvalid(
            _sentence(what[0]) if len(what) == 1 else f"{len(what)} invalid settings:",
            remedy="docs/configuration.md describes the settings of a model.",
            details=what if len(what) > 1 else (),
        )
    return reading.config.defaults


def _sentence(text: str) -> str:
    """Some texts of the reading of a config end with a full stop or a question already."""
    return text if text.endswith((".", "?")) else f"{text}."


def plan_with(
    spec: ModelSpec,
    launch: Launch | None,
    settings: ModelSettings,
    budget: Mapping[str, int],
    runtime: str | None,
    environ: Mapping[str, str],
) -> Planned:
    """The plan of ``spec`` with ``settings`` in place of its own, alone in ``budget``.

    ``launch``: what is known of its files and the runtime. Blocks for some milliseconds, and longer if files
    have to be read. Raises the errors of ``prepare``.
    """
    if launch is not None and spec.stay.by_command:
        spec = replace(spec, settings=launch.settings)
    changed = with_options(spec, settings)
    if launch is None or any(getattr(settings, name) is not None for name in _READ_AGAIN):
        launch = prepare_listed(changed, runtime=runtime, environ=environ)
    else:
        # Its paths and flags are complete; the other settings do not change them.
        kept = {name: getattr(launch.settings, name) for name in _AS_READ}
        launch = replace(launch, settings=structs.replace(changed.settings, **kept))
    needs: Counter[str] = Counter()
    shown: Mapping[str, Any] = {}
    refused: LlamasupError | None = None
    for planner, admission, own in admissions(changed, launch, budget):
        refused = refused or planner.refused(admission)
        shown = shown or planner.as_json(admission)
        needs.update(own)
    return Planned(shown, dict(needs), refused)
