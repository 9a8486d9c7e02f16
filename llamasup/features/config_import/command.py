"""Translates the configuration of another program (``llamasup config import``)."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, plural
from llamasup.core.system.text import printable
from llamasup.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llamasup.core.config.issues import Issue
    from llamasup.features.config_import.draft import Draft
    from llamasup.features.config_import.modelfile import Instruction

commands = command_set()

_MAX_BYTES: Final = 1 << 20
_STORES: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_HEADER: Final = (
    "# From {}, by llamasup config import. Comments name the source of a value, or what is missing.\n"
    "# Relative paths begin at the folder of this file.\n"
)

Source = Annotated[
    str, argument("FILE", "A config of llama-swap, a preset of llama.cpp, a Modelfile, or a model of Ollama.")
]
Output = Annotated[Path | None, option("--output", "PATH", "The file to write. Default: standard output.")]
Force = Annotated[bool, flag("--force", "Overwrite an existing file.")]


@commands.command("import")
@guarded
def import_config(view: View, file: Source, output: Output = None, force: Force = False) -> int:
    """Translate the configuration of another program.

    The result is a config with a comment at each translated or missing thing. Nothing is started, and the
    other program and its files are not changed.
    """
    from llamasup.cli.commands.config import write_config

    draft = _draft(file, os.environ)
    text, issues = draft.checked(_issues)
    text = f"{_HEADER.format(printable(file))}{text}"
    if output is None:
        write_result(text.rstrip("\n"))
    else:
        output = write_config(output, text, force=force)
    count = plural(len(draft.config.get("models", ())), "model")
    view.say("info", "config", f"Translated {count}. Read the comments.")
    for issue in issues:
        view.say("warning", "config", printable(f"Not complete: {issue.what}"))
    path = "FILE" if output is None else printable(shlex.quote(str(output)))
    view.say("info", "config", f"  → Check its files: llamasup config check {path}")
    return 1 if issues else 0


def _draft(source: str, environ: Mapping[str, str]) -> Draft:
    from llamasup.core.llama_server.inspect import find_runtime
    from llamasup.core.system.storage.folders import read_bounded
    from llamasup.features.config_import.llama_swap import from_llama_swap
    from llamasup.features.config_import.modelfile import from_modelfile, instructions_of
    from llamasup.features.config_import.preset import from_preset

    capabilities = find_runtime(None, environ).capabilities
    try:
        path = Path(source).expanduser()
        content, status = read_bounded(path, _MAX_BYTES)
        if status.st_size > _MAX_BYTES:
            raise ValueError(f"it has {status.st_size} bytes")  # noqa: TRY301 - reported below
    except (OSError, ValueError, RuntimeError) as error:
        if (stored := _stored(source, environ)) is not None:
            return from_modelfile(source, stored, capabilities)
        reason = getattr(error, "strerror", None) or error
        raise ConfigInvalid(
            f"{source!r} cannot be read ({reason}), and Ollama's store has no such model.",
            remedy="Give the path of a configuration, or a name of `ollama list`.",
        ) from None
    text = content.decode("utf-8-sig", "replace")
    first = next((line for line in text.splitlines() if not re.match(r"\s*(?:[#;]|$)", line)), "")
    if re.match(r"\s*[A-Za-z]+\s+[^\s=:]", first):
        found: list[Instruction] = []
        for word, value in instructions_of(text):
            found += (word == "FROM" and _stored(value, environ)) or [(word, value)]
        name = path.absolute().parent.name if path.stem == "Modelfile" else path.stem
        return from_modelfile(name, found, capabilities)
    translate = from_preset if re.match(r"\s*(?:\[|[\w.-]+\s*=)", first) else from_llama_swap
    return translate(text, capabilities)


def _stored(name: str, environ: Mapping[str, str]) -> tuple[Instruction, ...] | None:
    """Return the instructions of a model in Ollama's store; None if it has no such model."""
    from llamasup.core.system.storage.folders import read_bounded
    from llamasup.features.config_import.modelfile import instructions_in_store

    *host, model = name.split("/")
    model, _, tag = model.partition(":")
    parts = [*("registry.ollama.ai", "library")[: max(0, 2 - len(host))], *host, model, tag or "latest"]
    if not all(re.fullmatch(r"[\w-][\w.-]*", part) for part in parts):
        return None

    def read(path: Path) -> str:
        return read_bounded(path, _MAX_BYTES)[0].decode("utf-8", "replace")

    for store in (
        Path(each).expanduser().absolute() for each in (environ.get("OLLAMA_MODELS"), *_STORES) if each
    ):
        try:
            manifest = read(store.joinpath("manifests", *parts))
        except OSError:
            continue
        try:
            return tuple(instructions_in_store(manifest, store / "blobs", read))
        except (OSError, ValueError) as error:  # ValueError: it is not JSON
            what = f"{name!r} in Ollama's store {str(store)!r} cannot be read: {error}."
            raise ConfigInvalid(what, remedy="Check the store with `ollama show`.") from None
    return None


def _issues(text: str) -> Sequence[Issue]:
    from llamasup.core.config.reading import read_text
    from llamasup.features import config_keys

    unset = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "x")  # they are set where it is served
    environ = {**unset, **os.environ}
    return read_text(text.encode(), "The result", Path.cwd(), environ, config_keys())[1]
