"""Decides whether the files of a model may be removed: nothing else may need one of them (pure).

A file is needed under each name that leads to it, so files are compared as entries of folders: the path with
its folder resolved, and the links behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set

from msgspec import Struct

from llamasup.core.models.rules import ModelRule
from llamasup.core.models.spec import ModelSpec
from llamasup.core.settings.model import ModelSettings
from llamasup.errors import Conflict

Entries = Callable[[str], Sequence[str]]
"""Path → the entries that a load of the path reads: for a split set the entries of all parts, in order."""


class ServedFiles(Struct, frozen=True):
    """A model that is served.

    ``downloaded`` are the paths of its downloaded files; the file to load is first.
    """

    spec: ModelSpec
    downloaded: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The path of the file to load; empty: it has no file."""
        return next(iter(self.downloaded), "" if self.spec.is_remote else self.spec.source)

    @property
    def paths(self) -> Iterator[str]:
        spec = self.spec
        yield from filter(None, (self.first, *self.downloaded, spec.projector))
        yield from spec.settings.adapters
        yield from (path for path, _, _ in spec.identity)


def models_gone_with(
    removed: ModelSpec,
    going: Set[str],
    rules: Sequence[ModelRule],
    defaults: ModelSettings,
    served: Iterable[ServedFiles],
    entries: Entries,
) -> tuple[str, ...]:
    """List the ids of the models that are gone with the entries ``going``.

    These are ``removed``, and found or requested models with the same file.

    Raises Conflict if the config names one of the files, or another model needs it: a config with a missing
    file would be invalid at the next start.
    """

    def needs(paths: Iterable[str]) -> bool:
        return any(not going.isdisjoint(entries(path)) for path in paths)

    in_config = (
        *_named(defaults),
        *(path for rule in rules for path in (*_path_of(rule), *_named(rule.options))),
    )
    if needs(in_config):
        raise _stays(removed, "the config names its file")
    # These rules name files only by their ids, and the files must exist at the next start.
    without_source = {rule.name for rule in rules if rule.source is None}
    of_config = {name for rule in rules if not rule.is_pattern for name in rule.names}
    gone = [removed.id]
    for model in served:
        spec = model.spec
        if not needs(model.paths):
            continue
        if spec.id == removed.id:
            if not without_source.isdisjoint(spec.names):
                raise _stays(removed, "the config names its file")
        elif of_config.isdisjoint(spec.names) and model.first and entries(model.first)[0] in going:
            gone.append(spec.id)
        else:
            if of_config.isdisjoint(spec.names):
                raise _stays(removed, f"the model {spec.id!r} uses it", "Remove that model first.")
            raise _stays(removed, f"the model {spec.id!r} of the config uses it")
    return tuple(gone)


def _path_of(rule: ModelRule) -> tuple[str, ...]:
    return (rule.source,) if rule.source is not None and _is_path(rule.source) else ()


def _named(options: ModelSettings) -> Iterator[str]:
    """The paths in these settings, also in options for llama-server (``extra``)."""
    yield from options.files
    for word in options.extra or ():
        for value in (word, word.partition("=")[2]):
            for path in (value, *adapters_in(value)):
                if _is_path(path):
                    yield path


def adapters_in(value: str) -> list[str]:
    """Split an argument such as ``a.gguf:0.5,b.gguf:0``, llama-server's syntax for adapters, into paths."""
    return [adapter.rpartition(":")[0] or adapter for adapter in value.split(",")]


def _is_path(text: str) -> bool:
    return os.path.isabs(text)  # noqa: PTH117 - text, as given


def _stays(removed: ModelSpec, why: str, remedy: str = "Remove it from the config first.") -> Conflict:
    return Conflict(f"The file of {removed.id!r} stays: {why}.", remedy=remedy)
