"""The systemd unit that runs llamasup: values in, the text of the file out.

Decides what the service may do. A system unit has the whole sandbox and scores at most 1.5 in
``systemd-analyze security`` (X14). A unit of a user's own manager has what needs neither root nor user
namespaces (Ubuntu 24.04 and others keep those from unprivileged users): the rest would make it fail to start.
Every choice that a reader may wonder about carries its reason in the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from llamasup.errors import UsageInvalid
from llamasup.llama_server.settings import names_of

__all__ = [
    "MARKER",
    "Credential",
    "Unit",
    "checked_name",
    "is_hidden",
    "is_home",
    "is_ours",
    "name_for",
    "own_folders",
    "unit_text",
]

MARKER = "# Written by llamasup service install. Uninstall removes a file only if it begins with this line."

# The sockets of a run lie below /run/llamasup/NAME/PID-RANDOM and must stay under 108 bytes.
_LONGEST_NAME = 40
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_LONGEST_NAME - 1}}}")
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - what the sandbox replaces
_STOP_SLACK_S = 15.0

# Exit codes (docs/design.md) of what would fail again at once: usage, bad model, no model, no runtime, port
# taken or memory too small, unsafe or invalid configuration.
_DETERMINISTIC = "2 65 66 69 71 78"


@dataclass(frozen=True, slots=True)
class Credential:
    """A file that only its owner may read, given to llamasup by ``option``."""

    option: str
    path: str

    @property
    def name(self) -> str:
        """As systemd knows it."""
        return self.option.removeprefix("--")


@dataclass(frozen=True, slots=True)
class Unit:
    """One service. ``command`` runs llamasup in the foreground; paths in commands are absolute."""

    name: str
    command: tuple[str, ...]
    reload_command: tuple[str, ...]
    """Asks the process whose number follows to reload, and waits until it has."""
    drain_timeout_s: float
    stop_timeout_s: float
    of_many: bool = False
    """Whether it serves many models, with a config that a reload reads again."""
    is_local: bool = True
    """Whether only this machine can reach it."""
    downloads: bool = False
    """Whether it reaches for other machines itself."""
    of_user: bool = False
    """Whether the user's own service manager runs it."""
    run_as: str | None = None
    """The user whom a system unit runs as; None: one that exists only while it runs."""
    groups: tuple[str, ...] = ()
    """Groups that may open GPU devices here."""
    needed_paths: tuple[str, ...] = ()
    """What it must read; those that the sandbox hides are made visible."""
    written_folders: tuple[str, ...] = ()
    """Where it writes, besides folders of its own."""
    credentials: tuple[Credential, ...] = ()
    systemd_version: int = 0

    @property
    def file_name(self) -> str:
        return f"llamasup-{self.name}.service"

    @property
    def stays_here(self) -> bool:
        """Whether nothing of it goes beyond this machine."""
        return self.is_local and not self.downloads


def checked_name(name: str) -> str:
    """Raises UsageInvalid for what cannot be part of a unit's file name."""
    if _NAME.fullmatch(name):
        return name
    raise UsageInvalid(
        f"{name!r} is no name for a service.",
        remedy=f"Use at most {_LONGEST_NAME} letters, digits, dots, dashes and underscores.",
    )


def name_for(model: str, alias: str | None = None) -> str:
    """The name of a model's service, from ``--alias`` or the file's name. Its own result stays as it is."""
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
    """Whether ``folder`` is one that the sandbox hides as such: somebody's home, or what all share."""
    return folder in _HIDDEN or str(PurePath(folder).parent) in ("/home", "/run/user")


def own_folders(name: str) -> tuple[str, str, str]:
    """Of the system's service of this name: for state, for what can be made again, and for a run."""
    return f"/var/lib/llamasup/{name}", f"/var/cache/llamasup/{name}", f"/run/llamasup/{name}"


def unit_text(unit: Unit) -> str:
    """The unit file. Raises UsageInvalid for a path that systemd has no spelling for."""
    sections = [
        ("Unit", _about(unit)),
        ("Service", [*_process(unit), *_life(unit), *_place(unit), *_sandbox(unit)]),
        ("Install", [f"WantedBy={'default.target' if unit.of_user else 'multi-user.target'}"]),
    ]
    text = "\n\n".join("\n".join((f"[{title}]", *lines)) for title, lines in sections)
    hint = f"# To change it: systemctl {'--user ' if unit.of_user else ''}edit {unit.file_name}"
    return f"{MARKER}\n{hint}\n\n{text}\n"


# --- sections ----------------------------------------------------------------------------------------


def _about(unit: Unit) -> list[str]:
    lines = [f"Description=llamasup: {unit.name}"]
    if not unit.of_user:
        # An address other than loopback may not be there before, nor a way to other machines.
        network = "network.target" if unit.stays_here else "network-online.target"
        if not unit.stays_here:
            lines.append(f"Wants={network}")
        lines.append(f"After={network} nvidia-persistenced.service")
    return [
        *lines,
        *(
            ["# A model in a crash loop fails alone; what ends llamasup itself is tried again for ever."]
            if unit.of_many
            else ["# llamasup ends a crash loop by itself (exit code 75); then this tries again for ever."]
        ),
        "StartLimitIntervalSec=0",
    ]


def _process(unit: Unit) -> list[str]:
    words = _words(unit.command)
    handed_over = [] if unit.of_user else unit.credentials
    options: list[str] = []
    for each in unit.credentials:
        # Read by systemd as root and handed over: the service's own user need not be able to read it.
        options += [each.option, f"%d/{each.name}" if handed_over else _word(each.path)]
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = options
    reload_by_signal = unit.systemd_version >= 253
    first = "each model that is preloaded" if unit.of_many else "the model"
    return [
        f"# Ready once {first} has produced a real token.",
        f"Type={'notify-reload' if reload_by_signal else 'notify'}",
        f"ExecStart={' '.join(words)}",
        *(f"LoadCredential={each.name}:{_value(each.path)}" for each in handed_over),
        (
            "# Reads the config again: models that it says nothing new of are not touched."
            if unit.of_many
            else "# Restarts the model: requests in flight finish, others wait."
        ),
        *(
            ["ReloadSignal=SIGHUP"]
            if reload_by_signal
            else [f"ExecReload={' '.join(_words(unit.reload_command))} $MAINPID"]
        ),
    ]


def _life(unit: Unit) -> list[str]:
    slower = ["RestartSteps=6", "RestartMaxDelaySec=5min"] if unit.systemd_version >= 254 else []
    return [
        "# A load takes as long as it takes: llamasup asks for more time while its loop turns, and ends",
        "# a load that makes no progress itself.",
        "TimeoutStartSec=90",
        "# Drain and stop, and some more; then SIGKILL for all that is left. SIGTERM goes to llamasup alone.",
        f"TimeoutStopSec={round(unit.drain_timeout_s + unit.stop_timeout_s + _STOP_SLACK_S)}",
        "KillMode=mixed",
        "# Told by the event loop that carries the traffic: one that hangs is killed and started again.",
        "WatchdogSec=30",
        "Restart=on-failure",
        "RestartSec=5",
        *slower,
        "# Would fail again: usage, bad model, no model, no runtime, port or memory, configuration.",
        f"RestartPreventExitStatus={_DETERMINISTIC}",
        "# Out of memory ends the model's server, and llamasup starts it again, smaller if need be.",
        "OOMPolicy=continue",
    ]


def _place(unit: Unit) -> list[str]:
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
    who = ["DynamicUser=yes"] if unit.run_as is None else [f"User={unit.run_as}"]
    groups = [f"SupplementaryGroups={' '.join(unit.groups)}"] if unit.groups else []
    return [
        *who,
        *groups,
        "# Drivers keep what they have compiled below it.",
        f"Environment=HOME=%S/{folder}",
        *lines,
    ]


_SECCOMP = """\
NoNewPrivileges=yes
LockPersonality=yes
# Programs for the GPU are no memory that the CPU executes. A driver that compiles for the CPU itself
# (llvmpipe, some OpenCL) needs "no".
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
# @resources stays: threads are pinned, and memory is placed, with it.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM"""

_FILES_AND_DEVICES = """\
CapabilityBoundingSet=
PrivateUsers=yes
PrivateMounts=yes
PrivateTmp=yes
PrivateIPC=yes
# PrivateDevices=yes would hide the GPU: instead only GPUs can be opened (NVIDIA; DRM for AMD, Intel and
# Vulkan; KFD for ROCm). The driver must be loaded before the start.
PrivateDevices=no
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
ProtectSystem=strict
# Home folders are empty but for what is needed.
ProtectHome=tmpfs"""

_KERNEL = """\
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
# Memory and CPUs are read from /proc.
ProcSubset=all
KeyringMode=private
RemoveIPC=yes"""


def _sandbox(unit: Unit) -> list[str]:
    if unit.of_user:
        return ["# What needs neither root nor user namespaces.", *_SECCOMP.splitlines()]
    lines = ["# What it can see and touch.", *_FILES_AND_DEVICES.splitlines()]
    # "-": what is missing is for llamasup to report, with its remedy.
    written = _outermost(unit.written_folders)
    lines += [
        f'BindReadOnlyPaths="-{_path(path)}"'
        for path in _outermost(filter(is_hidden, unit.needed_paths))
        if not _is_below(path, written)
    ]
    lines += [f'{"BindPaths" if is_hidden(path) else "ReadWritePaths"}="-{_path(path)}"' for path in written]
    if unit.stays_here:
        lines += ["# Served to this machine alone.", "IPAddressDeny=any", "IPAddressAllow=localhost"]
    return [*lines, *_KERNEL.splitlines(), *_SECCOMP.splitlines()]


def _outermost(paths: Iterable[str]) -> list[str]:
    """Those that are not inside another."""
    each_once = sorted(set(paths))
    return [
        path for path in each_once if not _is_below(path, [other for other in each_once if other != path])
    ]


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(PurePath(path).is_relative_to(folder) for folder in folders)


# --- spelling ----------------------------------------------------------------------------------------


def _words(command: tuple[str, ...]) -> list[str]:
    program, *arguments = command
    # No variables in the program's own name, so no escape either.
    return [_word(program).replace("$$", "$"), *map(_word, arguments)]


def _word(text: str) -> str:
    """A word of a command line: systemd.service(5), "Command lines", and systemd.syntax(7), "Quoting"."""
    _refuse_unspeakable(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./$-]+", escaped) else f'"{escaped}"'


def _path(text: str) -> str:
    """A path between double quotes, where systemd knows no escape but that of ``%``."""
    if '"' in text or "\\" in text:
        raise _no_spelling(text)
    _refuse_unspeakable(text)
    return text.replace("%", "%%")


def _value(text: str) -> str:
    """A setting that reaches to the end of its line: a backslash there would go on with the next one."""
    _refuse_unspeakable(text)
    if text.endswith("\\") or text != text.strip():
        raise _no_spelling(text)
    return text.replace("%", "%%")


def _refuse_unspeakable(text: str) -> None:
    """Control characters, and bytes that are no UTF-8."""
    if not text.isprintable():
        raise _no_spelling(text)


def _no_spelling(text: str) -> UsageInvalid:
    return UsageInvalid(
        f"{text!r} holds a character that a systemd unit cannot name.", remedy="Rename the file or folder."
    )
