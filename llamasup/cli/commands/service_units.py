"""What ``llamasup service install`` and ``print`` were told, and the unit that this means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from llamasup.cli.options.shared import LOGGING, run_arguments, serve_arguments
from llamasup.errors import UsageInvalid
from llamasup.llama_server.settings import Settings
from llamasup.service.systemd.installation import Account
from llamasup.service.systemd.unit_file import Unit, checked_name, own_folders

if TYPE_CHECKING:
    from llamasup.config import Config

__all__ = ["Asked"]

_NAME_OF_MANY = "serve"
# Of the options of run those that serve has too.
_OF_BOTH = (
    *("host", "port", "insecure_no_auth", "api_key_file", "tls_cert", "tls_key"),
    *(option.field for option in LOGGING.options),
)
# What is said of the service, whatever it serves.
_OF_SERVICES = ("user", "name", "run_as", "json", "now", "runtime")
_OF_MANY = ("config", "models_dir", "watch", "token_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``given`` are the options of ``run`` by field, ``beside`` what only ``serve`` has; ``chosen`` has the
    flags of those that somebody gave, by field.
    """

    model: str | None
    settings: Settings
    given: Mapping[str, Any]
    config: Path | None
    beside: Mapping[str, Any]
    chosen: Mapping[str, str]
    runtime: str | None
    user: bool
    name: str | None
    run_as: str | None

    def unit(self) -> Unit:
        """Raises what ``run`` or ``serve`` would; UsageInvalid, ConfigInvalid."""
        of_many = [self.chosen[each] for each in _OF_MANY if each in self.chosen]
        if self.model is not None:
            if of_many:
                raise UsageInvalid(
                    f"MODEL and {of_many[0]} exclude each other: a service is of one model, or of many.",
                    remedy="Leave one of them out; a config names its models itself.",
                )
            return self._of_one(self.model)
        if "config" not in self.chosen and "models_dir" not in self.chosen:
            raise UsageInvalid(
                "There is nothing to serve: no MODEL is given.", remedy="Give one, or --config FILE for many."
            )
        of_one = self.chosen.keys() - {*_OF_MANY, *_OF_BOTH, *_OF_SERVICES}
        if of_one:
            flag = min(self.chosen[each] for each in of_one)
            raise UsageInvalid(
                f"{flag} is an option of one model's service.",
                remedy="Say it in the config (docs/configuration.md).",
            )
        return self._of_many()

    @property
    def _account(self) -> Account:
        return Account(of_user=self.user, run_as=self.run_as)

    def _of_one(self, model: str) -> Unit:
        from llamasup.service.systemd.run_unit import ServiceRequest, unit_for

        request = ServiceRequest(
            model=model,
            settings=self.settings,
            given=self.given,
            arguments=run_arguments,
            runtime=self.runtime,
            name=None if self.name is None else checked_name(self.name),
            account=self._account,
        )
        return unit_for(request, os.environ)

    def _of_many(self) -> Unit:
        from llamasup.cli.commands.serve import with_given
        from llamasup.config import Config
        from llamasup.config.sources import find_config
        from llamasup.service.systemd.installation import plain_path
        from llamasup.service.systemd.serve_unit import ServeRequest, serve_unit, service_environment
        from llamasup.system.storage.paths import expanded

        self._account.check()
        name = checked_name(self.name or _NAME_OF_MANY)
        path = None if self.config is None else plain_path(find_config(self.config, os.environ))
        environ = service_environment(name, self._account, os.environ)
        folders = tuple(plain_path(expanded(each)) for each in self.beside["models_dir"])
        config = (
            Config()
            if path is None
            else _sound_config(path, environ, own_folders(name), more_models=bool(folders))
        )
        given = {each: self.given[each] if each in self.chosen else None for each in _OF_BOTH}
        given |= {each: self.given[each] for each in ("insecure_no_auth", "log_level", "log_format")}
        given |= {**self.beside, "models_dir": tuple(map(str, folders)), "ready_file": None}
        for each, value in given.items():
            if isinstance(value, Path):
                given[each] = plain_path(expanded(str(value)))
        request = ServeRequest(
            name=name,
            config=with_given(config, folders, watch=self.beside["watch"], token_file=given["token_file"]),
            config_file=path,
            given=given,
            arguments=serve_arguments,
            runtime=self.runtime,
            account=self._account,
        )
        return serve_unit(request, os.environ)


def _sound_config(
    path: Path, environ: Mapping[str, str], own: tuple[str, ...], *, more_models: bool
) -> Config:
    """As the service will read it, with what it names. Raises ConfigInvalid with everything that is wrong."""
    from msgspec import structs

    from llamasup.cli.commands.config_check import missing_here
    from llamasup.config.mistakes import ConfigMistakes
    from llamasup.config.reading import read
    from llamasup.http.address import UnixAddress

    def is_own(place: PurePath) -> bool:
        return any(place.is_relative_to(each) for each in own)

    reading, mistakes = read(path, environ, more_models=more_models)
    config = reading.config
    log = config.http.access_log
    # Folders of its own are made at its start; whether it needs a key depends on more than the config.
    looked_for = structs.replace(
        config,
        listen=tuple(
            each
            for each in config.listen
            if not (isinstance(each, UnixAddress) and is_own(PurePath(each.path)))
        ),
        http=structs.replace(config.http, access_log=None if log is None or is_own(log) else log),
        auth=structs.replace(config.auth, insecure_no_auth=True),
    )
    mistakes += missing_here(replace(reading, config=looked_for), environ)
    if mistakes:
        raise ConfigMistakes(str(path), mistakes)
    return config
