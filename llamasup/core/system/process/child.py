"""The environment of every llama-server process, the exit of a process, and what it leaves behind (pure).

The environment is an allowlist (X6), never a copy of llamasup's. Deliberately absent: ``LLAMA_ARG_*`` (one
for a removed flag ends llama-server at once, b11434), ``LLAMA_API_KEY``, ``HF_TOKEN``, ``AIP_*``, cloud
keys, and ``LD_PRELOAD``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

RuntimeKind = Literal["binary", "embedded"]

_ALLOWED = (
    # the system
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_*", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("XDG_DATA_HOME", "XDG_DATA_DIRS"),  # Vulkan's loader searches them for drivers
    # Windows starts no program without these
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "TEMP", "TMP"),
    *("USERPROFILE", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "NUMBER_OF_PROCESSORS"),
    # where libraries and devices are found
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "GGML_*", "CUDA_*", "NVIDIA_*"),
    *("HIP_*", "HIPBLASLT_*", "HSA_*", "ROCR_*", "ROCM_*", "ROCBLAS_*", "GPU_DEVICE_ORDINAL", "MUSA_*"),
    *("ASCEND_*", "VK_*", "MESA_*", "RADV_*", "DRI_PRIME", "ONEAPI_*", "SYCL_*", "ZE_*"),
    # how many threads, and where
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*"),
)
# The prefixes above also match secrets, such as NVIDIA_API_KEY. No setting has such a part in its name.
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_ALLOWED_EMBEDDED = ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "VIRTUAL_ENV")
_LIBRARY_PATHS = {"darwin": "DYLD_LIBRARY_PATH", "win32": "PATH"}

WHY_SET: Mapping[str, str] = MappingProxyType(
    {
        "XDG_CONFIG_HOME": "an empty folder: llama-server reads flags from llama.cpp/config.ini there",
        "GGML_NO_BACKTRACE": "ggml's abort handler would start a debugger and wait for it without limit",
    }
)
"""The variables that ``child_environment`` always sets."""


def child_environment(
    environ: Mapping[str, str],
    *,
    kind: RuntimeKind,
    platform: str,
    config_home: str,
    library_path: str | None,
) -> dict[str, str]:
    """Return the allowed variables of ``environ``, and the variables that llamasup sets.

    ``config_home`` is an empty folder, ``library_path`` the binary's folder, to find its own libraries first.
    """
    allowed = _ALLOWED + _ALLOWED_EMBEDDED if kind == "embedded" else _ALLOWED
    if platform == "win32":  # where the names of variables ignore case
        environ = {name.upper(): value for name, value in environ.items()}
    prefixes = tuple(pattern.removesuffix("*") for pattern in allowed if pattern.endswith("*"))
    env = {
        name: value
        for name, value in environ.items()
        if (name in allowed or name.startswith(prefixes)) and not any(part in name for part in _SECRETS)
    }
    env["XDG_CONFIG_HOME"] = config_home
    env["GGML_NO_BACKTRACE"] = "1"
    if library_path is not None:
        name = _LIBRARY_PATHS.get(platform, "LD_LIBRARY_PATH")
        separator = ";" if platform == "win32" else ":"
        env[name] = separator.join(part for part in (library_path, env.get(name)) if part)
    return env


class Exit(Struct, frozen=True):
    """The exit of a process: either its exit code or the name of the signal (``"SIGKILL"``) is set."""

    code: int | None
    signal: str | None

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else self.signal


class StaleRun(Struct, frozen=True):
    """The run folder of a llamasup that has exited."""

    path: str
    pid: int
    answering: tuple[str, ...] = ()  # sockets in it on which a process still listens
