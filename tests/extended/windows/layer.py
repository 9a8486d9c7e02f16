"""Runs in the Windows Python: what the layer of Windows promises about files, locks, rights and processes.

Prints the name of each check that passed, and ends at the first that does not.
"""

import asyncio
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamasup.core.hub.part_file import Busy, PartFile
from llamasup.core.hub.remote_file import RemoteFile
from llamasup.core.system.event_loops import pipe_reader
from llamasup.core.system.native import native
from llamasup.core.system.process.spawn import spawn
from llamasup.core.system.storage.folders import Claimed, claim_file, open_private, private_folder
from llamasup.errors import BrokenRuntime, FolderUnusable

folder = Path(sys.argv[1]) if __name__ == "__main__" else Path()
windows_acl: Any = (
    importlib.import_module("llamasup.core.system.native.windows_acl") if __name__ == "__main__" else None
)
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def a_file_is_opened_as_the_flags_say() -> None:
    path = folder / "file"
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    refused(FileExistsError, lambda: open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    fd = open_private(path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"one two")
    path.rename(folder / "renamed")  # while it is open
    os.ftruncate(fd, 3)
    os.write(fd, b" three")
    os.close(fd)
    assert (folder / "renamed").read_bytes() == b"one three"
    os.close(open_private(folder / "renamed", os.O_WRONLY | os.O_TRUNC))
    assert (folder / "renamed").read_bytes() == b""
    refused(FileNotFoundError, lambda: open_private(path, os.O_WRONLY | os.O_TRUNC))


def a_symlink_is_not_followed() -> None:
    (folder / "target").write_bytes(b"precious")
    try:
        (folder / "link").symlink_to(folder / "target")
    except OSError:
        return  # a right that not every user has
    refused(OSError, lambda: open_private(folder / "link", os.O_WRONLY | os.O_TRUNC))
    assert (folder / "target").read_bytes() == b"precious"


def a_lock_excludes_others_and_lets_them_read() -> None:
    path = folder / "lock"
    fd = claim_file(path)
    assert fd is not None
    refused(Claimed, lambda: claim_file(path))
    os.write(fd, b"content")
    assert path.read_bytes() == b"content"
    os.close(fd)
    again = claim_file(path)
    assert again is not None
    os.close(again)


def reads_at_offsets_do_not_mix() -> None:
    (folder / "numbers").write_bytes(b"".join(b"%07d\n" % number for number in range(1000)))
    fd = os.open(folder / "numbers", os.O_RDONLY)
    with ThreadPoolExecutor(8) as threads:
        for number, line in enumerate(threads.map(lambda each: native.read_at(fd, 8, 8 * each), range(1000))):
            assert int(line) == number
    os.close(fd)


def a_download_is_locked_hashed_and_published() -> None:
    import hashlib

    target = folder / "model.gguf"
    part = PartFile(target)
    refused(Busy, lambda: PartFile(target))
    part.resume_as(RemoteFile(8))
    part.write(0, b"12345678")
    part.save()
    digest = hashlib.sha256()
    part.hash_into(digest, 0, 8)
    assert digest.digest() == hashlib.sha256(b"12345678").digest()
    part.publish("http://host/model.gguf")
    assert target.read_bytes() == b"12345678"
    assert sorted(path.name for path in folder.glob("*model*")) == [".model.gguf.origin.json", "model.gguf"]
    PartFile(folder / "other.gguf").discard()
    assert list(folder.glob("*other*")) == []


def a_file_that_others_have_open_is_not_waited_for_where_a_child_writes() -> None:
    (folder / "log").write_bytes(b"x")
    with (folder / "log").open("rb"):
        began_s = time.monotonic()
        assert not native.replace(folder / "log", folder / "log.1", waits=False)
        assert not native.remove(folder / "log", waits=False)
        assert time.monotonic() - began_s < 1.0
    assert native.replace(folder / "log", folder / "log.1", waits=False)


def a_file_that_others_keep_open_is_named() -> None:
    (folder / "keys").write_bytes(b"old")
    (folder / "new").write_bytes(b"new")
    with (folder / "keys").open("rb"):
        said = refused(PermissionError, lambda: native.replace(folder / "new", folder / "keys"))
        assert "another program has held the file 'keys' open for 2 s" in said, said
    native.replace(folder / "new", folder / "keys")
    assert (folder / "keys").read_bytes() == b"new"


def a_folder_in_the_way_is_not_waited_for() -> None:
    """Windows denies access there, too, and nothing has it open."""
    (folder / "way").mkdir()
    (folder / "new").write_bytes(b"new")
    began_s = time.monotonic()
    refused(OSError, lambda: native.replace(folder / "new", folder / "way"))
    assert time.monotonic() - began_s < 1.5


def a_folder_is_private() -> None:
    path = folder / "private"
    private_folder(path)
    users = windows_acl.users_with_rights(windows_acl._sddl_of(path))
    user = windows_acl._user_sid()
    assert users <= {"SY", "BA", "OW", user, windows_acl._in_sddl(user)}, users
    private_folder(path)
    assert native.is_own_folder(path, path.stat())


def a_folder_of_another_user_is_refused() -> None:
    path = folder / "foreign"
    path.mkdir()
    user_sid = windows_acl._user_sid
    windows_acl._user_sid = lambda: "S-1-5-21-1-2-3-1001"
    try:
        owner = windows_acl.owner_of(windows_acl._sddl_of(path))
        if owner in ("BA", "SY"):
            return  # Wine's user is an administrator, whom every user trusts
        assert not native.is_own_folder(path, path.stat())
        refused(FolderUnusable, lambda: private_folder(path))
    finally:
        windows_acl._user_sid = user_sid


def accounts_have_short_names() -> None:
    assert windows_acl._in_sddl("S-1-5-19") == "LS"
    assert windows_acl._in_sddl("S-1-5-20") == "NS"
    assert windows_acl._in_sddl("S-1-5-21-1-2-3-1001") == "S-1-5-21-1-2-3-1001"


def the_start_of_a_process_is_known_until_it_ends() -> None:
    assert native.start_of(os.getpid()) not in (None, "")
    assert native.start_of(0x7FFFFFF0) is None


def a_child_and_its_descendants_end_with_the_job() -> None:
    program = f"import subprocess, sys; print(subprocess.Popen({SLEEP!r}).pid, flush=True); input()"
    child = spawn([sys.executable, "-c", program], env=dict(os.environ), cwd=folder)
    with os.fdopen(child.output_fd, "rb") as output:
        grandchild = int(output.readline())
        assert native.start_of(grandchild) is not None
        child.kill_group()
        eventually(lambda: child.poll() is not None)
        eventually(lambda: native.start_of(grandchild) is None)


def descendants_end_with_a_supervisor_that_is_terminated() -> None:
    child = f"import subprocess, sys; print(subprocess.Popen({SLEEP!r}).pid, flush=True); input()"
    supervisor = (
        "import os, pathlib, sys, time; from llamasup.core.system.process.spawn import spawn\n"
        f"child = spawn([sys.executable, '-c', {child!r}], env=dict(os.environ), cwd=pathlib.Path('.'))\n"
        "print(child.pid, os.read(child.output_fd, 100).decode(), flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        below = [int(pid) for pid in process.stdout.readline().split()]
        assert len(below) == 2
        assert None not in map(native.start_of, below)
        process.kill()  # TerminateProcess
    for pid in below:
        eventually(lambda pid=pid: native.start_of(pid) is None)  # type: ignore[misc]


def a_child_that_cannot_be_put_into_its_job_does_not_stay() -> None:
    from llamasup.core.system.native.kernel_objects import JobObject

    started = []
    adopt = JobObject.adopt

    def refuse(job: JobObject, handle: int) -> None:
        raise OSError("AssignProcessToJobObject failed")

    popen = subprocess.Popen

    def spied(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    setattr(JobObject, "adopt", refuse)  # noqa: B010
    setattr(subprocess, "Popen", spied)  # noqa: B010
    try:
        refused(BrokenRuntime, lambda: spawn(SLEEP, env=dict(os.environ), cwd=folder))
    finally:
        setattr(JobObject, "adopt", adopt)  # noqa: B010
        setattr(subprocess, "Popen", popen)  # noqa: B010
    (one,) = started
    assert one.poll() is not None


def a_child_is_asked_to_stop() -> None:
    child = spawn(SLEEP, env=dict(os.environ), cwd=folder)
    with os.fdopen(child.output_fd, "rb") as output:
        assert output.readline().strip() == b"up"
        child.terminate()
        assert b"KeyboardInterrupt" in output.read()
    eventually(lambda: child.poll() is not None)


def the_device_nul_is_no_terminal() -> None:
    fd = os.open("NUL", os.O_RDONLY)
    assert not native.is_terminal(fd)
    os.close(fd)


def the_loop_reads_the_output_of_a_child() -> None:
    async def scenario() -> None:
        program = "for number in range(20000): print('line', number)"
        child = spawn([sys.executable, "-c", program], env=dict(os.environ), cwd=folder)
        async with pipe_reader(child.output_fd, 1 << 16) as reader:
            lines = (await reader.read()).split()
        assert lines[-1] == b"19999"
        await child.wait()

    asyncio.run(scenario())


def refused(error: type[Exception], act: Callable[[], object]) -> str:
    """The text of the error."""
    try:
        act()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


def eventually(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.02)


CHECKS = (
    a_file_is_opened_as_the_flags_say,
    a_symlink_is_not_followed,
    a_lock_excludes_others_and_lets_them_read,
    reads_at_offsets_do_not_mix,
    a_download_is_locked_hashed_and_published,
    a_file_that_others_have_open_is_not_waited_for_where_a_child_writes,
    a_file_that_others_keep_open_is_named,
    a_folder_in_the_way_is_not_waited_for,
    a_folder_is_private,
    a_folder_of_another_user_is_refused,
    accounts_have_short_names,
    the_start_of_a_process_is_known_until_it_ends,
    a_child_and_its_descendants_end_with_the_job,
    descendants_end_with_a_supervisor_that_is_terminated,
    a_child_that_cannot_be_put_into_its_job_does_not_stay,
    a_child_is_asked_to_stop,
    the_device_nul_is_no_terminal,
    the_loop_reads_the_output_of_a_child,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(check.__name__, flush=True)
