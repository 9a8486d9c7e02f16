"""Writes the text of the systemd unit that runs llamasup, and decides its permissions.

A system unit has the whole sandbox and scores at most 1.5 in ``systemd-analyze security`` (X14). A unit of
the user's own service manager has only the options that need neither root nor user namespaces, which Ubuntu
24.04 and others deny to unprivileged users; with more it would not start. Comments in the unit explain the
choices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from msgspec import Struct

from llamasup.core.settings.names import names_of
from llamasup.errors import UsageInvalid

MARKER = "# Written by llamasup service install. Uninstall removes a file only if it begins with this line."

# The sockets of a run lie below /run/llamasup/NAME/PID-RANDOM and must stay under 108 bytes.
_LONGEST_NAME = 40
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}")
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - what the sandbox replaces
_STOP_SLACK_S = 15.0

# Exit codes (docs/design.md) of errors that would occur again: usage, bad model, no model, no runtime, port
# in use or too little memory, unsafe or invalid configuration.
_DETERMINISTIC = "2 65 66 69 71 78"


class Credential(Struct, frozen=True):
    """A file that only its owner can read, passed to llamasup with ``option``."""

    option: str
    path: str

    @property
    def name(self) -> str:
        """The name in systemd."""
        return self.option.removeprefix("--")


class Unit(Struct, frozen=True):
    """A service. ``command`` runs llamasup in the foreground; paths in commands are absolute."""

    name: str
    command: tuple[str, ...]
    reload_command: tuple[str, ...]
    """Reloads the process whose ID follows, and waits for the end of the reload."""
    drain_timeout_s: float
    stop_timeout_s: float
    of_many: bool = False
    """Whether it serves many models, with a config that a reload reads again."""
    is_local: bool = True
    """Whether only this machine can reach it."""
    downloads: bool = False
    """Whether it connects to other machines."""
    of_user: bool = False
    """Whether the user's own service manager runs it."""
    run_as: str | None = None
    """The user of a system unit; None: a user that exists only while it runs."""
    groups: tuple[str, ...] = ()
    """Groups that can open GPU devices on this machine."""
    needed_paths: tuple[str, ...] = ()
    """Paths that it must read; hidden ones are made visible in the sandbox."""
    written_folders: tuple[str, ...] = ()
    """Folders that it writes to, besides its own."""
    credentials: tuple[Credential, ...] = ()
    has_nodes: bool = False
    """Other llamasup nodes that it reaches over the network."""
    systemd_version: int = 0

    @property
    def file_name(self) -> str:
        return f"llamasup-{self.name}.service"

    @property
    def stays_here(self) -> bool:
        """Whether all its traffic stays on this machine."""
        return self.is_local and not self.downloads and not self.has_nodes


def checked_name(name: str) -> str:
    """Raises UsageInvalid for what cannot be part of a unit's file name."""
    if _NAME.fullmatch(name):
        return name
    raise UsageInvalid(
        f"{name!r} is not a valid name for a service.",
        remedy=f"Use at most {_LONGEST_NAME} letters, digits, dots, dashes and underscores.",
    )


def name_for(model: str, alias: str | None = None) -> str:
    """Return the name of a model's service, from ``--alias`` or the file name. Idempotent."""
    base = PurePath(model).name
    path = model if alias is not None or base.endswith(".gguf") else f"{base}.gguf"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", names_of(path, alias).name).strip("-._")
    return name[:_LONGEST_NAME].rstrip("-._") or "model"


def is_ours(text: str) -> bool:
    return text.startswith(MARKER + "\n")


def is_hidden(path: str) -> bool:
    """Whether the sandbox of a system unit replaces the folder that ``path`` lies in."""
    return any(PurePath(path).is_relative_to(folder) for folder in _HIDDEN)


def is_home(folder: str) -> bool:
    """Whether the sandbox hides all of ``folder``: a home, or a shared folder."""
    return folder in _HIDDEN or str(PurePath(folder).parent) in ("/home", "/run/user")


def own_folders(name: str) -> tuple[str, str, str]:
    """Return the state, cache and runtime folders of the system service with this name."""
    return f"/var/lib/llamasup/{name}", f"/var/cache/llamasup/{name}", f"/run/llamasup/{name}"


def unit_text(unit: Unit) -> str:
    """Write the unit file. Raises UsageInvalid for a path that cannot be written in one."""
    sections = [
        ("Unit", _unit_section(unit)),
        (
            "Service",
            [*_command_lines(unit), *_restart_rules(unit), *_user_and_folders(unit), *_sandbox(unit)],
        ),
        ("Install", [f"WantedBy={'default.target' if unit.of_user else 'multi-user.target'}"]),
    ]
    text = "\n\n".join("\n".join((f"[{title}]", *lines)) for title, lines in sections)
    hint = f"# To change it: systemctl {'--user ' if unit.of_user else ''}edit {unit.file_name}"
    return f"{MARKER}\n{hint}\n\n{text}\n"


# --- sections ----------------------------------------------------------------------------------------


def _unit_section(unit: Unit) -> list[str]:
    lines = [f"Description=llamasup: {unit.name}"]
    if not unit.of_user:
        # Other addresses than loopback, and other machines, may not be reachable before.
        network = "network.target" if unit.stays_here else "network-online.target"
        if not unit.stays_here:
            lines.append(f"Wants={network}")
        lines.append(f"After={network} nvidia-persistenced.service")
    return [
        *lines,
        *(
            ["# A model in a crash loop fails alone; systemd restarts llamasup itself without limit."]
            if unit.of_many
            else ["# After a crash loop llamasup exits with code 75; systemd restarts it without limit."]
        ),
        "StartLimitIntervalSec=0",
    ]


def _command_lines(unit: Unit) -> list[str]:
    command = _quoted_command(unit.command)
    loaded = [] if unit.of_user else unit.credentials
    options: list[str] = []
    for file in unit.credentials:
        # systemd reads it as root, so the service's user need not be able to.
        options += [file.option, f"%d/{file.name}" if loaded else _quoted(file.path)]
    at = command.index("--") if "--" in command else len(command)
    command[at:at] = options
    reload_by_signal = unit.systemd_version >= 253
    first = "each preloaded model" if unit.of_many else "the model"
    return [
        f"# Ready once {first} has produced a real token.",
        f"Type={'notify-reload' if reload_by_signal else 'notify'}",
        f"ExecStart={' '.join(command)}",
        *(f"LoadCredential={file.name}:{_value(file.path)}" for file in loaded),
        (
            "# Reads the config again; models without changes are not restarted."
            if unit.of_many
            else "# Restarts the model: requests in flight finish, others wait."
        ),
        *(
            ["ReloadSignal=SIGHUP"]
            if reload_by_signal
            else [f"ExecReload={' '.join(_quoted_command(unit.reload_command))} $MAINPID"]
        ),
    ]


def _restart_rules(unit: Unit) -> list[str]:
    slower = ["RestartSteps=6", "RestartMaxDelaySec=5min"] if unit.systemd_version >= 254 else []
    return [
        "# A load may take longer: llamasup requests more time while its event loop runs, and ends a load",
        "# without progress itself.",
        "TimeoutStartSec=90",
        "# Drain, stop and a reserve; then SIGKILL for all processes. Only llamasup gets SIGTERM.",
        f"TimeoutStopSec={round(unit.drain_timeout_s + unit.stop_timeout_s + _STOP_SLACK_S)}",
        "KillMode=mixed",
        "# The event loop that carries the traffic sends heartbeats; if it hangs, llamasup is restarted.",
        "WatchdogSec=30",
        "Restart=on-failure",
        "RestartSec=5",
        *slower,
        "# Errors that would occur again: usage, bad model, no model, no runtime, port or memory, config.",
        f"RestartPreventExitStatus={_DETERMINISTIC}",
        "# Out of memory ends the model's server, and llamasup restarts it, smaller if necessary.",
        "OOMPolicy=continue",
    ]


def _user_and_folders(unit: Unit) -> list[str]:
    folder = f"llamasup/{unit.name}"
    lines = [
        f"RuntimeDirectory={folder}",
        f"StateDirectory={folder}",
        f"CacheDirectory={folder}",
        "RuntimeDirectoryMode=0700",
        "StateDirectoryMode=0700",
        "CacheDirectoryMode=0700",
        "# Weights may be locked in memory.",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        "# A core file would hold prompts.",
        "LimitCORE=0",
        "UMask=0077",
    ]
    if unit.of_user:
        return lines
    user = ["DynamicUser=yes"] if unit.run_as is None else [f"User={unit.run_as}"]
    groups = [f"SupplementaryGroups={' '.join(unit.groups)}"] if unit.groups else []
    return [
        *user,
        *groups,
        "# Drivers cache compiled code below it.",
        f"Environment=HOME=%S/{folder}",
        *lines,
    ]


_SECCOMP = """\
NoNewPrivileges=yes
LockPersonality=yes
# The CPU does not execute code for the GPU. A driver that compiles for the CPU (llvmpipe, some OpenCL)
# needs "no".
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
# @resources stays allowed, to pin threads and place memory.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM"""

_FILES_AND_DEVICES = """\
CapabilityBoundingSet=
PrivateUsers=yes
PrivateMounts=yes
PrivateTmp=yes
PrivateIPC=yes
# PrivateDevices=yes would hide the GPU. DeviceAllow= permits only GPUs (NVIDIA; DRM for AMD, Intel and
# Vulkan; KFD for ROCm). The driver must be loaded before the start.
PrivateDevices=no
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
ProtectSystem=strict
# Home folders contain only the needed files.
ProtectHome=tmpfs"""

_KERNEL = """\
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
# llamasup reads memory and CPUs from /proc.
ProcSubset=all
KeyringMode=private
RemoveIPC=yes"""


def _sandbox(unit: Unit) -> list[str]:
    if unit.of_user:
        return ["# Options that need neither root nor user namespaces.", *_SECCOMP.splitlines()]
    lines = ["# Files and devices.", *_FILES_AND_DEVICES.splitlines()]
    # "-": llamasup reports a missing path, with a remedy.
    written, read = _opened(unit)
    lines += [f'BindReadOnlyPaths="-{_path(path)}"' for path in read]
    lines += [f'{"BindPaths" if is_hidden(path) else "ReadWritePaths"}="-{_path(path)}"' for path in written]
    if unit.stays_here:
        lines += ["# Only this machine has access.", "IPAddressDeny=any", "IPAddressAllow=localhost"]
    return [*lines, *_KERNEL.splitlines(), *_SECCOMP.splitlines()]


def _opened(unit: Unit) -> tuple[list[str], list[str]]:
    """The paths that the sandbox of a system unit opens: for writing, and only for reading."""
    written = _outermost(unit.written_folders)
    read = _outermost(filter(is_hidden, unit.needed_paths))
    return written, [path for path in read if not _is_below(path, written)]


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths that are not inside another one."""
    unique = sorted(set(paths))
    return [path for path in unique if not _is_below(path, [other for other in unique if other != path])]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(PurePath(path).is_relative_to(folder) for folder in folders)


def odd_names(unit: Unit) -> Iterator[UsageInvalid]:
    """Return the error of ``unit_text`` for each name that systemd cannot read."""
    files = [file.path for file in unit.credentials]
    checks = [(_quoted, [*unit.command, *(files if unit.of_user else ())])]
    if not unit.of_user:
        checks += [(_path, path) for path in _opened(unit)]
        checks.append((_value, files))
    for check, names in checks:
        for name in names:
            try:
                check(name)
            except UsageInvalid as error:
                yield error


# --- quoting -----------------------------------------------------------------------------------------


def _quoted_command(command: tuple[str, ...]) -> list[str]:
    program, *arguments = command
    # systemd expands no variables in the program's path, so it needs no escape.
    return [_quoted(program).replace("$$", "$"), *map(_quoted, arguments)]


def _quoted(text: str) -> str:
    """A command line argument: systemd.service(5), "Command lines", and systemd.syntax(7), "Quoting"."""
    _check_printable(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./$-]+", escaped) else f'"{escaped}"'


def _path(text: str) -> str:
    """A path in double quotes, where only ``%`` can be escaped."""
    if '"' in text or "\\" in text:
        raise _unsupported_character(text)
    _check_printable(text)
    return text.replace("%", "%%")


def _value(text: str) -> str:
    """A setting that ends with its line; a backslash there would continue on the next line."""
    _check_printable(text)
    if text.endswith("\\") or text != text.strip():
        raise _unsupported_character(text)
    return text.replace("%", "%%")


def _check_printable(text: str) -> None:
    """Raises for control characters and invalid UTF-8."""
    if not text.isprintable():
        raise _unsupported_character(text)


def _unsupported_character(text: str) -> UsageInvalid:
    return UsageInvalid(
        f"{text!r} contains a character that is not allowed in a systemd unit.",
        remedy="Rename the file or folder.",
    )
