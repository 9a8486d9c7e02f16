"""Each check of doctor: its finding, whether it fails, and its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from llamasup.core.control.selection import Running
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.system.hardware.devices import Device
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.process.child import StaleRun
from llamasup.errors import LlamasupError
from llamasup.features.doctor.checks import as_json, option_names, run_checks
from llamasup.features.doctor.facts import (
    CertificateFact,
    Check,
    ConfigFile,
    Facts,
    FolderFact,
    ModelFact,
    NvmlFact,
    RuntimeFact,
)
from tests.core.planning.plans import NEW, OLD, capabilities, machine

GIB = 1 << 30
MIB = 1 << 20
H200 = Device("CUDA0", "NVIDIA H200", 139 * GIB, 100 * GIB)
BINARY = RuntimeFact("llama-server on PATH", capabilities(NEW), "/usr/bin/llama-server")
NONE = RuntimeFact("", LlamasupError("No llama-server was found.", remedy="Install the embedded one."))


def facts(**changes: Any) -> Facts:
    """A machine without problems, with ``changes`` of fields of ``Facts`` or ``Hardware``."""
    hardware_changes = {
        name: changes.pop(name) for name in list(changes) if name in machine().__struct_fields__
    }
    defaults: dict[str, Any] = {
        "hardware": machine(**hardware_changes),
        "runtimes": (BINARY,),
        "environ": {"PATH": "/usr/bin"},
        "port": 8080,
    }
    return Facts(**(defaults | changes))


def checks(name: str, **changes: Any) -> list[Check]:
    return [check for check in run_checks(facts(**changes)) if check.name == name]


def only(name: str, **changes: Any) -> Check:
    (check,) = checks(name, **changes)
    return check


def is_advice(check: Check) -> bool:
    return check.ok and check.remedy != ""


def test_ordinary_machine_passes_all_checks_with_unique_names() -> None:
    found = run_checks(facts())
    assert [check for check in found if not check.ok] == []
    names = [check.name for check in found]
    assert len(set(names)) == len(names)


def test_json_follows_contract() -> None:
    made = (Check("a", True, "fine"), Check("b", False, "broken", "mend it"))
    assert as_json(made) == {
        "ok": False,
        "checks": [
            {"name": "a", "ok": True, "found": "fine", "remedy": ""},
            {"name": "b", "ok": False, "found": "broken", "remedy": "mend it"},
        ],
    }
    assert as_json(made[:1])["ok"] is True
    odd = as_json((Check("model", False, "/m/\udcff.gguf: is a folder", "Name /m/\udcff.gguf"),))["checks"][0]
    assert (odd["found"], odd["remedy"]) == ("/m/\\xff.gguf: is a folder", "Name /m/\\xff.gguf")


# --- the runtime ---------------------------------------------------------------------------------


def test_runtime_shows_its_origin() -> None:
    found = only("runtime").found
    assert found == f"{NEW}, binary, llama-server on PATH: /usr/bin/llama-server"


def test_without_runtime_capabilities_and_devices_are_not_checked() -> None:
    broken = facts(runtimes=(NONE,))
    by_name = {check.name: check for check in run_checks(broken)}
    assert by_name["runtime"] == Check(
        "runtime", False, "No llama-server was found.", "Install the embedded one."
    )
    assert not {"capabilities", "devices"} & set(by_name)


def test_broken_second_runtime_is_no_failure() -> None:
    broken = RuntimeFact(
        "the embedded runtime", LlamasupError("It has no server.", remedy="Install it again.")
    )
    second = only("runtime 2", runtimes=(BINARY, broken))
    assert (second.ok, second.found) == (True, "It has no server.")
    third = only("runtime 3", runtimes=(BINARY, broken, BINARY))
    assert third.ok
    assert not only("runtime", runtimes=(broken, BINARY)).ok


def test_old_build_lists_missing_capabilities() -> None:
    assert only("capabilities").remedy == ""
    old = only("capabilities", runtimes=(RuntimeFact("", capabilities(OLD)),))
    assert is_advice(old)
    assert "not Unix sockets" in old.found
    assert "fitting layers" in old.found.partition("; not ")[2]
    bare = RuntimeFact("", Capabilities("1", (), ()))
    assert only("capabilities", runtimes=(bare,)).found.startswith("no optional features; not Unix sockets")


def test_ffmpeg_is_shown_or_advised() -> None:
    assert "are on PATH" in only("ffmpeg", has_ffmpeg=True).found
    missing = only("ffmpeg", has_ffmpeg=False)
    assert is_advice(missing)
    assert "WebP" in missing.found
    assert checks("ffmpeg", has_ffmpeg=None) == checks("ffmpeg", has_ffmpeg=False, runtimes=(NONE,)) == []


def test_model_check_shows_facts_or_error() -> None:
    assert checks("model") == []
    assert only("model", model=ModelFact("tiny", "llama decoder")).found == "tiny: llama decoder"
    refused = ModelFact("tiny", problem=LlamasupError("tiny needs 9 GiB", remedy="Take a smaller one."))
    assert only("model", model=refused) == Check("model", False, "tiny needs 9 GiB", "Take a smaller one.")


# --- devices -------------------------------------------------------------------------------------


def test_devices_show_free_and_shared_memory() -> None:
    apple = Device("MTL0", "Apple M4", 16 * GIB, 12 * GIB, shares_host_memory=True)
    assert only("devices", devices=(H200, apple)) == Check(
        "devices",
        True,
        "CUDA0 NVIDIA H200, 100 GiB free of 139 GiB; "
        "MTL0 Apple M4, 12 GiB free of 16 GiB, shared with the host",
    )


def with_gpu(drivers: frozenset[str]) -> Hardware:
    return machine(gpu_drivers=drivers)


def test_unused_gpu_fails_and_no_gpu_passes() -> None:
    assert only("devices").ok
    unused = only("devices", hardware=with_gpu(frozenset({"NVIDIA"})))
    assert not unused.ok
    assert "CUDA or Vulkan" in unused.remedy
    assert "nvidia-smi" in unused.remedy
    assert "ROCm" in only("devices", hardware=with_gpu(frozenset({"AMD"}))).remedy


def test_device_error_of_build_is_shown() -> None:
    message = "ggml_cuda_init: failed to initialize CUDA: CUDA driver version is insufficient"
    runtimes = (RuntimeFact("", replace(capabilities(NEW), device_problem=message)),)
    unused = only("devices", runtimes=runtimes, hardware=with_gpu(frozenset({"NVIDIA"})))
    assert not unused.ok
    assert unused.found.endswith(f"many times slower; the build says: {message}")
    assert only("devices", runtimes=runtimes) == Check(
        "devices", True, f"none: the CPU computes; the build says: {message}"
    )


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpu_passes(hidden: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": hidden}
    assert only("devices", hardware=with_gpu(frozenset({"NVIDIA"})), environ=environ).ok
    assert not only("devices", hardware=with_gpu(frozenset({"NVIDIA", "AMD"})), environ=environ).ok


@pytest.mark.parametrize(
    ("nvml", "ok", "says"),
    [
        (NvmlFact(gpus=1), True, "1 GPU"),
        (NvmlFact(gpus=2), True, "2 GPUs"),
        (NvmlFact(error="not installed", problem="no package"), True, "nvidia-ml-py"),
        (NvmlFact(error="NVMLError_LibRmVersionMismatch", problem="mismatch"), False, "Reboot"),
        (NvmlFact(error="NVMLError_NoPermission", problem="Insufficient Permissions"), False, "/dev/nvidia*"),
        (NvmlFact(error="NVMLError_LibraryNotFound", problem="not found"), True, "utility"),
    ],
)
def test_nvml_error_fails_only_if_cuda_fails_too(nvml: NvmlFact, ok: bool, says: str) -> None:
    check = only("NVML", nvml=nvml)
    assert check.ok is ok
    assert says in f"{check.found} {check.remedy}"


def test_nvml_is_not_checked_without_nvidia_gpu() -> None:
    assert checks("NVML") == []


# --- the machine ---------------------------------------------------------------------------------


def test_memory_shows_limit_and_swap() -> None:
    assert only("memory").found == "28 GiB free of 32 GiB"
    limited = only(
        "memory",
        memory_total_bytes=4 * GIB,
        memory_available_bytes=3 * GIB,
        cgroup_memory_limit_bytes=4 * GIB,
        swap_total_bytes=2 * GIB,
        swap_free_bytes=GIB,
    )
    assert limited.found == (
        "3.0 GiB free of 4.0 GiB, limited to 4.0 GiB by cgroup; swap 1.0 GiB free of 2.0 GiB"
    )
    assert limited.ok


def test_too_little_memory_fails_and_names_its_limit() -> None:
    assert not only("memory", memory_available_bytes=100 * MIB).ok
    limited = only(
        "memory",
        memory_total_bytes=400 * MIB,
        memory_available_bytes=300 * MIB,
        cgroup_memory_limit_bytes=400 * MIB,
    )
    assert not limited.ok
    assert "MemoryMax" in limited.remedy


def test_limit_of_locked_memory_passes_with_advice() -> None:
    assert is_advice(only("locked memory", memlock_limit_bytes=0))
    assert only("locked memory", memlock_limit_bytes=None).remedy == ""
    assert checks("locked memory", platform="darwin") == []


def test_address_space_smaller_than_memory_fails() -> None:
    assert only("address space").found == "unlimited"
    small = only("address space", address_space_limit_bytes=16 * GIB)
    assert not small.ok
    assert "ulimit -v unlimited" in small.remedy
    assert only("address space", address_space_limit_bytes=64 * GIB).ok
    # CUDA maps all that its GPUs have.
    assert not only("address space", address_space_limit_bytes=64 * GIB, devices=(H200,)).ok


def test_less_than_one_cpu_fails() -> None:
    assert only("CPU").found == "8 cores, 16 CPUs allowed"
    assert (
        only("CPU", cpu_quota=1.5).found == "8 cores, 16 CPUs allowed, limited to the time of 1.5 by cgroup"
    )
    throttled = only("CPU", cpu_quota=0.5)
    assert not throttled.ok
    assert "CPUQuota" in throttled.remedy


def test_numa_nodes_get_advice_and_balancing_fails_without_gpu() -> None:
    assert checks("NUMA") == []
    still = only("NUMA", numa_nodes=2)
    assert is_advice(still)
    assert "--numa distribute" in still.remedy
    moving = only("NUMA", numa_nodes=2, numa_balancing=True)
    assert not moving.ok
    assert "kernel.numa_balancing=0" in moving.remedy
    assert only("NUMA", numa_nodes=2, numa_balancing=True, devices=(H200,)).ok


@pytest.mark.parametrize("setting", ["always", "madvise", "never"])
def test_every_huge_pages_setting_passes(setting: str) -> None:
    assert only("transparent huge pages", huge_pages=setting) == Check(
        "transparent huge pages", True, setting
    )
    assert checks("transparent huge pages") == []


def test_missing_right_to_raise_priority_passes_with_advice() -> None:
    assert only("priority", may_raise_priority=True).remedy == ""
    assert is_advice(only("priority"))
    assert checks("priority", platform="darwin") == []


@pytest.mark.parametrize(
    ("limit", "ok", "advises", "clients"),
    [
        (None, True, False, "unlimited"),
        (65536, True, False, "32748"),
        (1024, True, True, "492"),
        (64, False, True, "12 "),
        (8, False, True, "0 "),
    ],
)
def test_open_files_limit_is_shown_as_number_of_clients(
    limit: int | None, ok: bool, advises: bool, clients: str
) -> None:
    check = only("open files", open_files_limit=limit)
    assert (check.ok, check.remedy != "") == (ok, advises)
    assert clients in check.found


# --- what llamasup itself needs ------------------------------------------------------------------


def test_each_folder_has_its_own_check() -> None:
    folders = (
        FolderFact("run", "/run/user/1000/llamasup"),
        FolderFact("cache", "/var/cache", note="not at home"),
        FolderFact("state", problem=LlamasupError("It belongs to user 0.", remedy="Make it yours.")),
    )
    assert only("run folder", folders=folders).found == "/run/user/1000/llamasup"
    assert only("cache folder", folders=folders).found == "/var/cache (not at home)"
    assert only("state folder", folders=folders) == Check(
        "state folder", False, "It belongs to user 0.", "Make it yours."
    )


def test_left_folder_passes_and_one_with_listening_process_fails() -> None:
    assert only("left behind").found == "nothing"
    dead = StaleRun("/run/llamasup/17-abc", 17)
    assert only("left behind", left_folders=(dead,)) == Check(
        "left behind",
        True,
        "by a llamasup that was killed: /run/llamasup/17-abc",
        "Nothing to do: the next llamasup run removes it.",
    )
    orphan = StaleRun("/run/llamasup/18-abc", 18, ("/run/llamasup/18-abc/1.sock",))
    check = only("left behind", left_folders=(dead, orphan))
    assert not check.ok
    assert "pid 18" in check.found
    assert "/run/llamasup/18-abc/1.sock" in check.found
    assert "The next llamasup run ends it." in check.remedy


def test_unusable_port_shows_error_of_run() -> None:
    assert only("port").found == "8080 is free"
    assert only("port", port=0).found == "any free port"
    taken = LlamasupError("port 8080 is in use by nginx (pid 7)", remedy="Choose another.")
    assert only("port", port_problem=taken) == Check("port", False, taken.message, taken.remedy)


def test_port_of_other_llamasup_passes_and_shows_its_models() -> None:
    taken = LlamasupError("port 8080 is in use by llamasup (pid 7)", remedy="stop that process")
    running = Running(7, "http://127.0.0.1:8080", "", ("tiny (ready)", "big (loading)"), "")
    check = only("port", port_problem=taken, running=running)
    assert is_advice(check)
    assert check.found == (
        "8080: a llamasup (pid 7) serves tiny (ready), big (loading) at http://127.0.0.1:8080"
    )
    assert "another port" in check.remedy
    idle = only("port", port_problem=taken, running=Running(7, "http://127.0.0.1:8080", "", (), ""))
    assert "serves nothing at" in idle.found


# --- options of llama-server from files and the environment ----------------------------------------


def test_option_names_of_config_file_are_found_without_comments_and_values() -> None:
    text = "; a comment = no\n# no = no\n[*]\nctx-size = 4096\n--api-key=secret\n\n= 7\nctx-size=1\nword\n"
    assert option_names(text) == ("ctx-size", "api-key")
    assert option_names("") == ()


def test_user_config_file_is_reported_as_not_read() -> None:
    check = only("llama.cpp config", config_files=(ConfigFile("/home/a/config.ini", ("ctx-size",), True),))
    assert is_advice(check)
    assert "ctx-size" in check.found


@pytest.mark.parametrize(
    ("settings", "ok"), [(("ctx-size",), True), (("ctx-size", "api-key"), False), (("api-prefix",), False)]
)
def test_system_config_file_fails_if_it_locks_llamasup_out(settings: tuple[str, ...], ok: bool) -> None:
    file = ConfigFile("/etc/llama.cpp/config.ini", settings, is_ignored=False)
    check = only("llama.cpp config", config_files=(file,))
    assert check.ok is ok
    assert settings[-1] in check.found
    assert ok or settings[-1] in check.remedy


def test_inherited_settings_are_listed_without_values() -> None:
    assert checks("environment") == []
    environ = {"LLAMA_ARG_CTX_SIZE": "1", "LLAMA_API_KEY": "sesame", "LLAMASUP_API_KEY": "k", "HOME": "/"}
    check = only("environment", environ=environ)
    assert check.found.endswith("LLAMA_API_KEY (use --api-key-file), LLAMA_ARG_CTX_SIZE (use --ctx-size).")
    assert is_advice(check)


ENDS = "2026-12-01 00:00 UTC"


@pytest.mark.parametrize(
    ("fact", "ok", "found", "advised"),
    [
        (CertificateFact("c.pem", ends=ENDS), True, f"c.pem is valid until {ENDS}", ""),
        (
            CertificateFact("c.pem", f"expires on {ENDS}", ends=ENDS),
            True,
            f"c.pem expires on {ENDS}",
            "before that date",
        ),
        (
            CertificateFact("c.pem", f"expired on {ENDS}", False, ENDS),
            False,
            f"c.pem expired on {ENDS}",
            "clock",
        ),
        (CertificateFact("c.pem", "cannot be read: x", False), False, "c.pem cannot be read: x", "PEM"),
    ],
)
def test_certificate_shows_its_dates_or_problem(
    fact: CertificateFact, ok: bool, found: str, advised: str
) -> None:
    assert checks("certificate") == []
    check = only("certificate", certificate=fact)
    assert (check.ok, check.found) == (ok, found)
    assert advised in check.remedy
