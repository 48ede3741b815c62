"""What a sandboxed process is shut in by. It does this to itself, before it runs a line that it was given, and nothing
of it can be undone.

| wall      | keeps from                                                                     | needs                |
|-----------|--------------------------------------------------------------------------------|----------------------|
| `filter`  | network, processes, signals to others, tracing, mounting (`sandbox_filter.py`) | seccomp              |
| `files`   | every file but its folder, and, to read, the interpreter's libraries           | Landlock, Linux 5.13 |
| `limits`  | memory, CPU time, sizes and numbers of files, core dumps                       |                      |
| `user`    | what root may do: another user, without capabilities                           | being root           |

No user namespace is needed, which many distributions and containers refuse to ordinary users. Where one of the first
three cannot be put up, there is an error and nothing runs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.rewards.sandbox_filter import LIBC, ask_seccomp, call, install, machine

WALLS = frozenset({"filter", "files", "limits", "user"})
NOBODY = 65534

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38  # linux/prctl.h
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2

# linux/landlock.h; the numbers of its calls are the same on all machines
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
FIRST_RIGHTS = (1 << 13) - 1
ADDED_RIGHTS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # REFER, TRUNCATE, IOCTL_DEV, by version
IOCTL_DEV = 1 << 15
NET_VERSION, NET_RIGHTS = 4, 0b11  # bind and connect, TCP
SCOPE_VERSION, SCOPES = 6, 0b11  # abstract sockets of others, signals to others

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class Unprotected(Exception):
    """This machine cannot put up a wall. One or two lines with the fix."""


def check() -> None:
    """Raise Unprotected if this is no machine on which model code can be shut in."""
    if not sys.platform.startswith("linux") or machine() is None:
        raise Unprotected(
            f"a model's code is only run shut in, on Linux (x86-64, aarch64), not {sys.platform} {os.uname().machine}. "
            "Start the collector there, such as in a virtual machine"
        )
    for name, ask in (("seccomp", ask_seccomp), ("Landlock", landlock_version)):
        try:
            ask()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise Unprotected(
                f"a model's code is only run shut in, and this kernel gives no {name} ({reason}). Take Linux 5.13 or "
                "newer with landlock in /sys/kernel/security/lsm; in Docker, 23 or newer"
            ) from None


def landlock_version() -> int:
    """Of the kernel's Landlock. Raises OSError if it has none."""
    return call(CREATE_RULESET, 0, 0, ASK_VERSION)


def enter(
    folder: Path,
    *,
    readable: Sequence[str],
    memory_bytes: int,
    cpu_s: int,
    file_bytes: int,
    files: int,
    walls: frozenset[str],
    parent: int,
) -> None:
    """Put up the walls around this process. Raises OSError.

    folder: its own, the only place that it can write to. readable: beside the interpreter and its libraries.
    memory_bytes: of address space beyond what it has. walls: which; all but in the tests' controls. parent: with
    which it dies.
    """
    if "limits" in walls:
        limits = {
            resource.RLIMIT_AS: _address_space() + memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_FSIZE: file_bytes,
            resource.RLIMIT_NOFILE: files,
            resource.RLIMIT_CORE: 1,  # 0 keeps dumps from files, and not from programs that take them (core(5))
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, value in limits.items():
            _, most = resource.getrlimit(limit)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(limit, (value, value))
        # The first thread's stack grows as far as its memory goes: deep recursion is no fault.
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (memory_bytes if most == resource.RLIM_INFINITY else most, most))
    libraries = _interpreter()
    with suppress(OSError):  # short of memory, the kernel takes this process first; where it may be asked for that
        Path("/proc/self/oom_score_adj").write_text("1000")
    if "user" in walls and os.geteuid() == 0:
        _leave_root(libraries[0])
    # After the change of user, which clears both: who watches it may see what it holds open (`sandbox_folder.held`).
    _prctl(PR_SET_DUMPABLE, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if "files" in walls:
        _shut_files(folder, [*libraries, *LIBRARIES, *readable])
    if "filter" in walls:
        here = machine()
        if here is None:
            raise OSError(f"no filter for {os.uname().machine}")
        install(here, os.getpid())


def _interpreter() -> list[str]:
    """Folders of the standard library, and of what its modules are linked with."""
    paths = sysconfig.get_paths()
    return [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib")]


def _address_space() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _leave_root(libraries: str) -> None:
    """Become nobody, without capabilities; where only root's own files have the interpreter, as under /root, with the
    one to read, which Landlock narrows to what is named."""
    _prctl(PR_SET_KEEPCAPS, 1)
    with suppress(OSError):  # a container that maps no other user or group: what follows takes root's rights as well
        os.setgroups([])
    with suppress(OSError):
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        _set_capabilities(CAP_DAC_READ_SEARCH, 0)
    except PermissionError:  # a container whose root has not got it
        _set_capabilities(0, 0)
        return
    kept = 0 if os.access(os.path.join(libraries, "os.py"), os.R_OK, effective_ids=True) else CAP_DAC_READ_SEARCH
    _set_capabilities(kept, kept)


def _set_capabilities(permitted: int, effective: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0))
    sets = ctypes.create_string_buffer(struct.pack("=6I", effective, permitted, 0, 0, 0, 0))
    call(CAPSET[os.uname().machine], header, sets)


def _prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _shut_files(folder: Path, readable: Sequence[str]) -> None:
    """Landlock: all rights in the folder, reading of what is named and exists, nothing elsewhere."""
    version = landlock_version()
    files = FIRST_RIGHTS | sum(right for since, right in ADDED_RIGHTS.items() if version >= since)
    handled = [files]
    if version >= NET_VERSION:
        handled.append(NET_RIGHTS)
    if version >= SCOPE_VERSION:
        handled.append(SCOPES)
    asked = ctypes.create_string_buffer(struct.pack(f"={len(handled)}Q", *handled), 8 * len(handled))
    ruleset = call(CREATE_RULESET, asked, 8 * len(handled), 0)
    own = files & ~(EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK | IOCTL_DEV)
    try:
        _allow(ruleset, str(folder), own)
    except PermissionError:
        raise PermissionError(
            f"programs run as another user, who does not get to {folder}: set TMPDIR to a folder with a way for all"
        ) from None
    for path in dict.fromkeys(readable):
        _allow(ruleset, path, READ_FILE | READ_DIR)
    for path in DEVICES:
        _allow(ruleset, path, READ_FILE | WRITE_FILE)
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not os.path.isdir(path):
            rights &= READ_FILE | WRITE_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        call(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
