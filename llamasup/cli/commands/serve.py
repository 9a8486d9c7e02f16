"""Serves many models, from a config or from folders (``llamasup serve``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.errors import UsageInvalid

if TYPE_CHECKING:
    from llamasup.cli.foreground import OutputOptions
    from llamasup.core.config.config_keys import Config
    from llamasup.core.supervision.events import Bus
    from llamasup.service.hosting import Service

commands = command_set()

NOTHING: Mapping[str, Any] = MappingProxyType({})


@commands.command()
@takes_groups
def serve(
    ctx: typer.Context,
    *,
    config: o.ConfigFile = None,
    watch: o.Watch = False,
    runtime: o.RuntimeOption = None,
    defaults: o.ModelDefaults,
    overrides: o.ConfigOverrides,
    parent: o.ParentProgram,
    logging: o.Logging,
) -> int:
    """Serve many models, from a config or from folders."""
    from llamasup.cli.foreground import OutputOptions

    output = OutputOptions(**parent, **logging)
    if parent["sidecar"] and overrides["port"] is None:
        overrides["port"] = 0
    return serve_models(
        config,
        output,
        began_s=ctx.obj,
        watch=watch,
        defaults={field: value for field, value in defaults.items() if o.was_given(ctx, field)},
        runtime=runtime,
        **overrides,
    )


def serve_models(
    config_file: Path | None,
    output: OutputOptions,
    *,
    began_s: float,
    models_dir: tuple[str, ...],
    watch: bool,
    token_file: Path | None,
    defaults: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> int:
    """Serve until stopped. A value in ``options`` replaces the config's.

    Returns the exit code (docs/design.md, Exit codes).
    """
    from llamasup.cli.foreground import open_sockets, serve_until_stopped

    given = {name: value for name, value in options.items() if value is not None and value is not False}

    def prepare() -> Callable[[Bus], Service]:
        from llamasup.core.auth.key_source import environment_keys
        from llamasup.core.config.config_keys import Config
        from llamasup.core.config.reading import VARIABLE, find_config, load
        from llamasup.core.system.storage.paths import expanded, require_folders
        from llamasup.features import config_keys
        from llamasup.service.hosting import Service
        from llamasup.service.serve import ServeOptions

        folders = tuple(expanded(folder, of="--models-dir") for folder in models_dir)
        require_folders(folders, of="--models-dir")
        # With folders on the command line, a config in a default path is not read.
        is_named = config_file is not None or bool(os.environ.get(VARIABLE))
        path = find_config(config_file, os.environ) if is_named or not folders else None

        def adjust(config: Config) -> Config:
            return with_overrides(config, folders, watch=watch, token_file=token_file, defaults=defaults)

        def read() -> Config:
            if path is None:
                return adjust(Config())
            return adjust(load(path, os.environ, config_keys(), more_models=bool(folders)))

        options = ServeOptions.of(
            read,
            config_file=path,
            adjust=adjust,
            more_models=bool(folders),
            api_keys=environment_keys(os.environ),
            sockets=open_sockets(),
            **given,
        )
        from llamasup.fleet.settings import is_front

        if options.initial_config is not None and is_front(options.initial_config):
            from llamasup.fleet.membership import as_front

            options = as_front(options, os.environ, has_own_models=bool(folders))
        return partial(Service, options)

    return serve_until_stopped(prepare, output, began_s, "checking the models and the machine")


def with_overrides(
    config: Config,
    folders: tuple[Path, ...],
    *,
    watch: bool,
    token_file: Path | None,
    defaults: Mapping[str, Any] = NOTHING,
) -> Config:
    """Apply the values of the command line to ``config``, each time that the config is read."""
    from msgspec import structs

    from llamasup.core.system.storage.paths import expanded
    from llamasup.features import key_of_option

    if token_file is not None:
        downloads = key_of_option("downloads", "--token-file")
        path = expanded(token_file, UsageInvalid, of="--token-file")
        config = config.having(downloads, structs.replace(config.of(downloads), token_file=path))
    return structs.replace(
        config,
        models_dir=(*config.models_dir, *folders),
        watch=config.watch or watch,
        defaults=structs.replace(config.defaults, **defaults),
    )
