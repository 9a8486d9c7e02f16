"""The tables of keys of a config, and the keywords of the Python API, from the declarations of settings."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import cleandoc

from llamasup.core.config.config_keys import Config
from llamasup.core.config.json_schema import Row, rows_of
from llamasup.core.settings.declaration import settings_of
from llamasup.core.settings.kinds import (
    Boolean,
    FilePath,
    Integer,
    IntegerOr,
    Kind,
    Many,
    OneOf,
    Section,
    Time,
)
from llamasup.core.settings.model import ModelEntry, ModelSettings
from llamasup.core.settings.sections import Fleet, FleetModel, PeerEntry, VirtualEntry

LOCATIONS = frozenset({"path", "repo", "url"})


def keys() -> str:
    """The tables of keys: one for each section of a config."""
    parts = [_table("At the top", "", rows_of(Config))]
    for name, (_, setting) in settings_of(Config).items():
        if name == "models":
            about = f"{setting.about}\n\nOf one model, besides the keys of [`defaults`](#defaults):"
            parts.append(_table("`models`", about, rows_of(ModelEntry, but=ModelSettings)))
        elif name == "virtual_models":
            about = (VirtualEntry.__doc__ or "").replace(
                "docs/virtual-models.md", "[virtual-models.md](virtual-models.md)"
            )
            parts.append(_table("`virtual_models`", f"Of one name. {about}", rows_of(VirtualEntry)))
        elif name == "peers":
            about = (PeerEntry.__doc__ or "").replace("docs/fleet.md", "[fleet.md](fleet.md)")
            parts.append(_table("`peers`", f"Of one node: {about[0].lower()}{about[1:]}", rows_of(PeerEntry)))
        elif isinstance(setting.kind, Section):
            group = setting.kind.keys
            about = cleandoc(group.__doc__ or "").replace("``", "`").replace("\n", " ")
            about = about.replace("docs/fleet.md", "[fleet.md](fleet.md#with-ray)")
            parts.append(_table(f"`{name}`", about, rows_of(group)))
            if group is Fleet:
                about = cleandoc(FleetModel.__doc__ or "")
                parts.append(_table("`fleet.models`", about, rows_of(FleetModel)))
    return "\n\n".join(parts)


def _table(title: str, about: str, rows: Iterable[Row]) -> str:
    lines = [
        f"### {title}",
        "",
        *([about, ""] if about else []),
        "| key | takes | default | |",
        "|---|---|---|---|",
    ]
    for row in rows:
        about = _cell(row.about) + ("" if row.is_safe else " ¹")
        lines.append(f"| `{row.key}` | {_cell(row.takes)} | {_cell(row.default)} | {about} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A table cell that shows patterns and variables unchanged."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def arguments() -> str:
    """The fields of ``ModelArguments``: all settings of a model by name, except where its file is."""
    fields = dict(settings_of(ModelEntry).values())
    return "\n".join(
        f"    {field}: {_python_type(setting.kind)} | None"
        for field, setting in fields.items()
        if field not in LOCATIONS
    )


def _python_type(kind: Kind) -> str:
    match kind:
        case Many(of):
            return f"Sequence[{_python_type(of)}]"
        case FilePath():
            return "str | Path"
        case Boolean():
            return "bool"
        case Time():
            return "float"
        case Integer():
            return "int"
        case IntegerOr(_, choices):
            return f"int | {_literal(choices)}"
        case OneOf(choices):
            return _literal(choices)
        case _:
            return "str"


def _literal(choices: Iterable[str]) -> str:
    quoted = ", ".join(f'"{choice}"' for choice in choices)
    return f"Literal[{quoted}]"
