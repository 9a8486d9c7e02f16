"""``llamasup service …``: prints, writes and removes a systemd unit, and shows its state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Group, switch, takes_groups, text
from llamasup.cli.options.model import WithExtra
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View
from llamasup.errors import ServiceManagerFailed, UsageInvalid
from llamasup.llama_server.settings import Settings
from llamasup.service.systemd.systemctl import Units
from llamasup.service.systemd.unit_file import Unit, checked_name, name_for, own_folders, unit_text

if TYPE_CHECKING:
    from llamasup.config import Config
    from llamasup.service.systemd.installation import Account

__all__ = ["commands"]

commands = command_set("service", "Run llamasup as a systemd service.")

_USER_HELP = "Use your own service manager instead of the system's."
User = Annotated[bool, typer.Option("--user", help=_USER_HELP)]
_UNIT = Group(
    (
        switch("--user", "user", _USER_HELP),
        text(
            "--name",
            "name",
            "NAME",
            "The unit is llamasup-NAME.service. Default: the model's name, or serve.",
        ),
        text(
            "--run-as",
            "run_as",
            "USER",
            "User of the service. Default: a dynamic user that exists while it runs.",
        ),
    )
)
UnitOptions = Annotated[o.OptionValues, _UNIT]
# Options that serve has and run has not.
_BESIDE = Group(tuple(each for each in o.BESIDE_CONFIG.options if each.field in {"models_dir", "token_file"}))
Beside = Annotated[o.OptionValues, _BESIDE]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, org/repo[:quant], an https URL, or 'demo'. Without it: serve many models.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Serve the models of this config.")
]
Now = Annotated[bool, typer.Option("--now", help="Also start the service, now and at every boot.")]
Service = Annotated[
    str,
    typer.Argument(metavar="NAME|MODEL", help="The name of the service, or its model.", show_default=False),
]


@commands.command("print", cls=WithExtra)
@takes_groups
def print_(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    beside: Beside,
    watch: o.Watch = False,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
) -> int:
    """Print the unit file that install would write.

    With MODEL the options are those of run, otherwise those of serve.
    """
    given = {**listening, **serving, **logging}
    asked = _asked(ctx, model, settings, given, config, {**beside, "watch": watch}, runtime=runtime, **unit)

    def act(view: View) -> None:
        unit = asked.unit()
        text = unit_text(unit)
        path = str(Units(unit.of_user).path(unit.file_name))
        if json:
            write_json({"unit": unit.file_name, "path": path, "text": text})
        else:
            write_result(text.rstrip("\n"))

    return guarded(act)


@commands.command(cls=WithExtra)
@takes_groups
def install(
    ctx: typer.Context,
    model: Model = None,
    *,
    config: ConfigFile = None,
    beside: Beside,
    watch: o.Watch = False,
    unit: UnitOptions,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    logging: o.Logging,
    json: o.Json = False,
    now: Now = False,
) -> int:
    """Write or update the unit file of a service.

    With MODEL the options are those of run, otherwise those of serve.
    """
    given = {**listening, **serving, **logging}
    asked = _asked(ctx, model, settings, given, config, {**beside, "watch": watch}, runtime=runtime, **unit)

    def act(view: View) -> None:
        units = Units(asked.user)
        units.require_permission()
        unit = asked.unit()
        path = units.path(unit.file_name)
        was_there = units.own(unit.file_name) is not None
        changed = units.write(unit.file_name, unit_text(unit))
        _say(view, f"{'Changed' if was_there else 'Wrote'} {path}" if changed else f"{path} is up to date")
        units.systemctl("daemon-reload")
        if now:
            units.systemctl("enable", unit.file_name)
            # Waits until it is ready. A changed unit needs a restart.
            units.systemctl("restart" if changed else "start", unit.file_name, timeout_s=None)
            _say(view, f"{unit.file_name} is ready, and will start at every boot")
        else:
            prefix = "systemctl --user" if unit.of_user else "systemctl"
            _say(view, f"  → Start it: {prefix} enable --now {unit.file_name}")
        if unit.of_user:
            _say(view, "  → It stops at the end of your last session. To keep it: loginctl enable-linger")
        if os.environ.get("LLAMASUP_API_KEY") and _has_no_key(unit):
            _say(view, "  → The service does not see your $LLAMASUP_API_KEY: use --api-key-file.")
        if json:
            write_json({"unit": unit.file_name, "path": str(path), "changed": changed, "started": now})

    return guarded(act)


@commands.command()
def uninstall(name: Service, user: User = False, json: o.Json = False) -> int:
    """Stop a service and remove its unit file."""

    def act(view: View) -> None:
        units, file_name = Units(user), _file_name(name)
        units.require_permission()
        path = units.path(file_name)
        removed = units.own(file_name) is not None
        if removed:
            units.systemctl("disable", "--now", file_name, timeout_s=None)
            units.remove(file_name)
            units.systemctl("daemon-reload")
            with suppress(ServiceManagerFailed):  # a failed unit stays listed without its file
                units.systemctl("reset-failed", file_name)
            _say(view, f"Stopped {file_name} and removed {path}. Its logs remain.")
        else:
            _say(view, f"{path} does not exist.")
        if json:
            write_json({"unit": file_name, "path": str(path), "removed": removed})

    return guarded(act)


@commands.command()
def status(name: Service, user: User = False, json: o.Json = False) -> int:
    """Show whether a service is installed, and its state."""

    def act(view: View) -> None:
        units, file_name = Units(user), _file_name(name)
        path = units.path(file_name)
        text = units.read(file_name)
        state = _state(units, file_name)
        shown = {"unit": file_name, "path": str(path), "installed": text is not None, **state}
        if json:
            write_json(shown)
        else:
            write_result(table([(key, _shown(value)) for key, value in shown.items()], indent=""))

    return guarded(act)


def _has_no_key(unit: Unit) -> bool:
    """Whether the unit passes no key. A user's own service with a config reads its keys itself."""
    told = any(each.option == "--api-key-file" for each in unit.credentials)
    return not told and not (unit.of_many and unit.of_user)


def _file_name(text: str) -> str:
    """The unit of a service, given by its name, its unit or its model."""
    if not PurePath(text).name:
        raise UsageInvalid(
            f"{text!r} is not the name of a service.", remedy="Give its name, its unit or its model."
        )
    name = text.removeprefix("llamasup-").removesuffix(".service") if text.endswith(".service") else text
    return f"llamasup-{checked_name(name_for(name))}.service"


def _state(units: Units, file_name: str) -> Mapping[str, Any]:
    found = units.state(file_name)
    pid, restarts = found.get("MainPID", "0"), found.get("NRestarts", "0")
    memory = found.get("MemoryCurrent", "")
    return {
        "loaded": found.get("LoadState") == "loaded",
        "enabled": found.get("UnitFileState") == "enabled",
        "active": found.get("ActiveState", "unknown"),
        "sub": found.get("SubState", ""),
        "result": found.get("Result", ""),
        "exit_code": int(found.get("ExecMainStatus") or 0),
        "status": found.get("StatusText", ""),
        "pid": int(pid) or None,
        "restarts": int(restarts),
        "since": found.get("ActiveEnterTimestamp") or None,
        "memory_bytes": int(memory) if memory.isdecimal() and int(memory) < 1 << 63 else None,
    }


def _shown(value: object) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _say(view: View, text: str) -> None:
    view.say("info", "service", text)


# --- the unit of the options -------------------------------------------------------------------------


def _asked(
    ctx: typer.Context,
    model: str | None,
    settings: Settings,
    given: o.OptionValues,
    config: Path | None,
    beside: o.OptionValues,
    **unit: Any,
) -> Asked:
    flags = {each.name or "": each.opts[0] for each in ctx.command.params}
    chosen = {name: flag for name, flag in flags.items() if o.was_given(ctx, name)}
    return Asked(
        model=model, settings=settings, given=given, config=config, beside=beside, chosen=chosen, **unit
    )


_NAME_OF_MANY = "serve"
# Options that run and serve have.
_OF_BOTH = (
    *("host", "port", "insecure_no_auth", "api_key_file", "tls_cert", "tls_key"),
    *(option.field for option in o.LOGGING.options),
)
# Options of every service.
_OF_SERVICES = ("user", "name", "run_as", "json", "now", "runtime")
_OF_MANY = ("config", "models_dir", "watch", "token_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of ``install`` and ``print`` by field: ``given`` are the options of ``run``, ``beside``
    those that only ``serve`` has, ``chosen`` the flags on the command line.
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
                    f"MODEL and {of_many[0]} exclude each other: a service serves one model, or many.",
                    remedy="Leave one of them out. A config names its own models.",
                )
            return self._of_one(self.model)
        if "config" not in self.chosen and "models_dir" not in self.chosen:
            raise UsageInvalid(
                "Nothing to serve: neither MODEL, --config nor --models-dir is given.",
                remedy="Give a MODEL, or --config FILE for many models.",
            )
        of_one = self.chosen.keys() - {*_OF_MANY, *_OF_BOTH, *_OF_SERVICES}
        if of_one:
            flag = min(self.chosen[each] for each in of_one)
            raise UsageInvalid(
                f"{flag} needs MODEL: with --config or --models-dir it is a setting of the config.",
                remedy="Set it in the config (docs/configuration.md).",
            )
        return self._of_many()

    @property
    def _account(self) -> Account:
        from llamasup.service.systemd.installation import Account

        return Account(of_user=self.user, run_as=self.run_as)

    def _of_one(self, model: str) -> Unit:
        from llamasup.service.systemd.run_unit import ServiceRequest, unit_for

        request = ServiceRequest(
            model=model,
            settings=self.settings,
            given=self.given,
            arguments=o.run_arguments,
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
            arguments=o.serve_arguments,
            runtime=self.runtime,
            account=self._account,
        )
        return serve_unit(request, os.environ)


def _sound_config(
    path: Path, environ: Mapping[str, str], own: tuple[str, ...], *, more_models: bool
) -> Config:
    """The config as the service will read it. Raises ConfigInvalid with every mistake and missing file."""
    from msgspec import structs

    from llamasup.cli.commands.config_check import missing_here
    from llamasup.config.issues import ConfigIssues
    from llamasup.config.reading import read
    from llamasup.http.address import UnixAddress

    def is_own(place: PurePath) -> bool:
        return any(place.is_relative_to(each) for each in own)

    reading, issues = read(path, environ, more_models=more_models)
    config = reading.config
    log = config.http.access_log
    # Its own folders are created at its start; whether it needs a key depends on more than the config.
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
    issues += missing_here(replace(reading, config=looked_for), environ)
    if issues:
        raise ConfigIssues(str(path), issues)
    return config
