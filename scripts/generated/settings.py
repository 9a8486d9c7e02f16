"""The lists of keys of a config, and the keywords of the Python API, from the declarations of settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from textwrap import fill

from msgspec import Struct, structs

from llamasup.core.config.config_keys import Config, keys_of
from llamasup.core.settings.declaration import Setting, default_text, settings_of
from llamasup.core.settings.kinds import (
    Boolean,
    FilePath,
    Integer,
    IntegerOr,
    Kind,
    Listen,
    Many,
    Name,
    Named,
    OneOf,
    Section,
    SizeText,
    Time,
)
from llamasup.core.settings.model import ModelEntry, ModelSettings
from llamasup.features import config_keys
from llamasup.features.peers.settings import PeerEntry
from llamasup.features.virtual.settings import VirtualEntry
from llamasup.fleet.settings import Fleet, FleetModel

_PLURALS = {"a name or pattern": "names or patterns", "text": "texts"}
"""What a list has several of."""
LOCATIONS = frozenset({"path", "repo", "url"})


def keys() -> str:
    """The lists of keys: one for each section of a config."""
    top = keys_of(config_keys())
    parts = [_list("At the top", "", Config, top)]
    for name, (_, setting) in top.items():
        if name == "models":
            about = "Of one model, besides the keys of [`defaults`](#defaults):"
            shared = settings_of(ModelSettings)
            entry = entry_type()
            own = {key: of for key, of in settings_of(entry).items() if key not in shared}
            parts.append(_list("`models`", about, entry, own))
        elif name == "virtual_models":
            parts.append(_list("`virtual_models`", f"Of one name. {VirtualEntry.__doc__}", VirtualEntry))
        elif name == "peers":
            about = PeerEntry.__doc__ or ""
            parts.append(_list("`peers`", f"Of one node: {about[0].lower()}{about[1:]}", PeerEntry))
        elif isinstance(setting.kind, Section):
            group = setting.kind.keys
            about = cleandoc(group.__doc__ or "").replace("``", "`").replace("\n", " ")
            about = "" if about == setting.about else about  # the list at the top has it
            parts.append(_list(f"`{name}`", about, group))
            if group is Fleet:
                shared = settings_of(Fleet)
                own = {key: of for key, of in settings_of(FleetModel).items() if key not in shared}
                repeated = ", ".join(f"`{key}`" for key in settings_of(FleetModel) if key in shared)
                about = f"Of one model: {repeated} as above, and these keys:"
                parts.append(_list("`fleet.models`", about, FleetModel, own))
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", "\n\n".join(parts))


def entry_type() -> type[Struct]:
    """The type of an entry of ``models``, which a feature may extend."""
    kind = keys_of(config_keys())["models"][1].kind
    assert isinstance(kind, Named)
    assert isinstance(kind.of, Section)
    return kind.of.keys


def _list(
    title: str, about: str, group: type[Struct], keys: Mapping[str, tuple[str, Setting]] | None = None
) -> str:
    """Write the list of a section's keys, or of these ``keys``."""
    lines = [f"### {title}", "", *([about, ""] if about else [])]
    defaults = {field.name: field.default for field in structs.fields(group)}
    for name, (field, setting) in (settings_of(group) if keys is None else keys).items():
        default = default_text(defaults.get(field) if setting.default is None else setting.default)
        note = "" if setting.outside == "nothing" else " ¹"
        takes = _with_default(_shown(takes_text(setting.kind)), _shown(default))
        begin = f"- [`{name}`](#{name}):" if takes == "keys" else f"- `{name}`: {takes}."
        lines.append(_wrapped(f"{begin} {_shown(setting.about)}{note}"))
    return "\n".join(lines)


def takes_text(kind: Kind) -> str:
    """Describe the values that a key takes. The page explains how times, sizes and names are written."""
    match kind:
        case Many(of, or_one):
            return f"{takes_text(of)}; or a list" if or_one else f"a list of {_PLURALS[takes_text(of)]}"
        case Section(keys, short=short) if short:
            return f"{takes_text(settings_of(keys)[short][1].kind)}; or keys"
        case Section():
            return "keys"
        case Named(Section()):
            return "names, each with keys"
        case Named(of):
            return f"names, each with {takes_text(of)}"
        case Integer() | IntegerOr():
            return re.sub("^a whole number,? (from )?", "", kind.allowed)
        case Listen():
            return kind.allowed.replace(" such as 127.0.0.1:8080 or [::1]:8080", "")
        case Time() | SizeText():
            return re.sub(" such as [^,]+(, 10m)?( or 1h30m)?", "", kind.allowed)
        case Name(pattern=pattern):
            return "a name or pattern" if pattern else "a name"
        case FilePath(allowed=allowed):
            return allowed.removeprefix("the path of ")
        case _:
            return kind.allowed


def _with_default(takes: str, default: str) -> str:
    """Show the default in bold if it is one of the listed words, otherwise in parentheses."""
    if default in ("", "none"):
        return takes
    if takes == Boolean.allowed and default in ("true", "false"):
        return f"**{default}**"  # the page says that this is a boolean
    word = rf"(?<![\w-]){re.escape(default)}(?![\w-])"
    return re.sub(word, f"**{default}**", takes) if re.search(word, takes) else f"{takes} ({default})"


def _wrapped(item: str) -> str:
    return fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _shown(text: str) -> str:
    """Show patterns and variables unchanged."""
    return text.replace("*", "\\*").replace("_", "\\_")


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
