"""Gathers the facts that a plan is made from: runtime, model, machine. Starts nothing."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamasup.core.address import Address, TcpAddress, UnixAddress
from llamasup.core.errors import ModelInvalid, ModelMissing, UsageInvalid
from llamasup.core.gguf import ModelFacts
from llamasup.core.hand_paths import with_absolute_paths
from llamasup.core.hardware import Hardware
from llamasup.core.memory import refuse_misfit
from llamasup.core.naming import names_of
from llamasup.core.plan import LaunchPlan, child_address_kind, needs_key_file, plan, plan_as_json
from llamasup.core.settings import Settings
from llamasup.effects.files import atomic_write, cache_folder, private_folder
from llamasup.effects.hardware import hardware
from llamasup.effects.model_file import read_model
from llamasup.effects.runtimes import Runtime, find_runtime, library_folder

__all__ = ["Launch", "find_model", "prepare"]

DEMO = "demo"
KEY_BYTES = 24


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that is known before the first start of one model. Paths in ``settings`` are absolute."""

    model_id: str
    aliases: tuple[str, ...]  # other names that clients may use
    model_path: Path
    model: ModelFacts
    draft: ModelFacts | None
    mmproj: ModelFacts | None
    runtime: Runtime
    settings: Settings
    environ: Mapping[str, str]

    def plan(self, folder: Path, generation: int) -> LaunchPlan:
        """The plan of one generation, whose private files are in ``folder``.

        Each generation has an address of its own, so that a child that lingers cannot be mistaken for
        its successor. The machine is looked at anew: memory and limits change. Writes nothing, except
        the key file of a build that takes its key in no other way.

        Raises UsageInvalid, ModelInvalid or RuntimeMissing.
        """
        address = self._address(folder, generation)
        key = None if isinstance(address, UnixAddress) else secrets.token_urlsafe(KEY_BYTES)
        key_file = None
        if key is not None and needs_key_file(self.runtime.capabilities):
            key_file = folder / f"{generation}.key"
            atomic_write(key_file, key.encode())
        return self._plan(folder, address, hardware(), key, None if key_file is None else str(key_file))

    def check(self) -> None:
        """Plan once for the sake of the errors alone, before anything is started.

        Raises what ``plan`` raises, and DoesNotFit for what this machine could never hold. Nothing is
        written and no port is asked for.
        """
        nowhere = Path("/nonexistent")
        if child_address_kind(self.runtime.capabilities, platform=sys.platform) == "unix":
            made = self._plan(nowhere, UnixAddress(str(nowhere / "0.sock")), hardware(), None, None)
        else:
            tcp = TcpAddress("127.0.0.1", 0)
            made = self._plan(nowhere, tcp, hardware(), "key", str(nowhere / "0.key"))
        refuse_misfit(made.memory)

    def _address(self, folder: Path, generation: int) -> Address:
        if child_address_kind(self.runtime.capabilities, platform=sys.platform) == "unix":
            return UnixAddress(str(folder / f"{generation}.sock"))
        return TcpAddress("127.0.0.1", _free_loopback_port())

    def _plan(
        self, folder: Path, address: Address, machine: Hardware, key: str | None, key_file: str | None
    ) -> LaunchPlan:
        runtime = self.runtime
        return plan(
            command=runtime.command,
            kind=runtime.kind,
            capabilities=runtime.capabilities,
            model=self.model,
            model_path=str(self.model_path),
            hardware=machine,
            settings=self.settings,
            address=address,
            environ=self.environ,
            config_home=str(folder),
            library_path=library_folder(runtime.kind, runtime.path),
            draft=self.draft,
            mmproj=self.mmproj,
            api_key=key,
            api_key_file=key_file,
        )

    def as_json(self, launch_plan: LaunchPlan) -> Mapping[str, Any]:
        """The ``plan`` object of the contract (docs/design.md)."""
        runtime = self.runtime
        return plan_as_json(
            launch_plan,
            model=str(self.model_path),
            path=runtime.path,
            kind=runtime.kind,
            version=runtime.capabilities.version,
        )


def prepare(model: str, settings: Settings, *, runtime: str | None, environ: Mapping[str, str]) -> Launch:
    """Find and read everything that a plan needs.

    Raises ModelMissing, ModelInvalid, RuntimeMissing or UsageInvalid; nothing has been started then.
    """
    path = find_model(model)
    facts = read_model(path)
    settings = replace(
        settings,
        draft_model=_absolute("--draft-model", settings.draft_model),
        mmproj=_absolute("--mmproj", settings.mmproj),
    )
    draft = _read_beside("--draft-model", settings.draft_model)
    mmproj = _read_beside("--mmproj", settings.mmproj)
    found = find_runtime(runtime, environ)
    # The child runs in a folder of its own, where a relative path would mean something else.
    extra = with_absolute_paths(found.capabilities, settings.extra, lambda name: str(expanded(name)))
    names = names_of(str(path), settings.alias)
    return Launch(
        model_id=names.name,
        aliases=names.aliases,
        model_path=path,
        model=facts,
        draft=draft,
        mmproj=mmproj,
        runtime=found,
        settings=replace(settings, extra=extra),
        environ=environ,
    )


def find_model(name: str) -> Path:
    """The file that MODEL means. Raises ModelMissing or UsageInvalid."""
    if not name:
        raise UsageInvalid("MODEL is empty.", remedy="Give the path of a GGUF file, or 'demo'.")
    path = expanded(name)
    if name == DEMO and not _is_file(path):
        return _demo_file()
    if _is_there(path):
        return path
    if name.startswith(("http://", "https://")):
        raise ModelMissing(
            f"llamasup cannot download {name!r} yet.", remedy="Download the file and give its path."
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        raise ModelMissing(
            f"There is no file {name!r}, and llamasup cannot download from a model hub yet.",
            remedy="Download the GGUF file and give its path.",
        )
    return path  # read_model says what is wrong with it, and what is near


def expanded(name: str) -> Path:
    """The absolute path that a person means by ``name``, whether anything is there or not.

    Raises ModelMissing where it cannot be told.
    """
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        user = name.split("/")[0]
        raise ModelMissing(
            f"{name}: there is no user {user.removeprefix('~')!r} whose folder {user} could be",
            remedy=f"Write the path out; for a file of that very name in this folder say ./{name}",
        ) from None
    except FileNotFoundError:
        raise ModelMissing(
            f"{name}: the current folder no longer exists", remedy="Change to another folder (cd)."
        ) from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    """Whether something is there, or on the way there, about which read_model can say what is wrong."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _demo_file() -> Path:
    """The demo model, written once into the cache folder."""
    from llamasup.core.demo_model import demo_model

    content = demo_model()
    path = private_folder(cache_folder()) / "demo.gguf"
    if not path.exists() or path.read_bytes() != content:
        atomic_write(path, content)
    return path


def _absolute(option: str, name: str | None) -> str | None:
    if name is None:
        return None
    with _naming(option):
        return str(expanded(name))


def _read_beside(option: str, path: str | None) -> ModelFacts | None:
    """A file that belongs to the model; what is wrong with it names the option that gave it."""
    if path is None:
        return None
    with _naming(option):
        return read_model(path)


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except (ModelMissing, ModelInvalid) as error:
        raise type(error)(f"{option}: {error.message}", remedy=error.remedy) from None


def _free_loopback_port() -> int:
    """A port that was free a moment ago; if somebody takes it first, the next start asks for another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
