"""Which system calls a sandboxed process may make: a seccomp filter (seccomp(2), BPF).

A list of what is allowed, not of what is forbidden: the kernel gains calls, and each that is not here fails, with
EPERM, which Python raises as PermissionError, or as on a kernel that has no such call yet. What is here reads,
computes, or acts on files that were opened, which Landlock decides (`sandbox_walls.py`). Some calls are allowed for
some arguments only, each for a reason that stands beside it.

The published bindings need the C library `libseccomp`, which slim images do not have; a filter is 300 numbers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)

# linux/seccomp.h, linux/bpf_common.h
SECCOMP_SET_MODE_FILTER, SECCOMP_GET_ACTION_AVAIL = 1, 2
KILL = 0x80000000
ALLOW = 0x7FFF0000
FAIL = 0x00050000  # with the errno in its low bits
REFUSED = FAIL | errno.EPERM
UNKNOWN = FAIL | errno.ENOSYS
UNSUPPORTED = FAIL | errno.EOPNOTSUPP
DONE = FAIL  # without an error: the call does nothing, and says that it did
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

NEW = 424
"""From this number on, calls are numbered alike on all machines, and came with Linux 5.1 and later. C libraries do
without them, if they hear that there are none."""

X32 = 0x40000000  # bit of the x32 interface's numbers, which are other calls under the same architecture

_FILES = """read:0/63 write:1/64 readv:19/65 writev:20/66 pread64:17/67 pwrite64:18/68 close:3/57
lseek:8/62 flock:73/32 dup:32/23 dup2:33/- dup3:292/24 pipe:22/- pipe2:293/59 ftruncate:77/46 sendfile:40/71
copy_file_range:326/285 creat:85/- stat:4/- lstat:6/- fstat:5/80
newfstatat:262/79 statx:332/291 statfs:137/43 fstatfs:138/44 access:21/- faccessat:269/48 faccessat2:439/439
readlink:89/- readlinkat:267/78 getcwd:79/17 chdir:80/49 fchdir:81/50 getdents64:217/61 umask:95/166 mkdir:83/-
mkdirat:258/34 rmdir:84/- unlink:87/- unlinkat:263/35 rename:82/- renameat:264/38 renameat2:316/276 link:86/-
linkat:265/37 symlink:88/- symlinkat:266/36 poll:7/- ppoll:271/73 select:23/- pselect6:270/72 epoll_create:213/-
epoll_create1:291/20 epoll_ctl:233/21 epoll_wait:232/- epoll_pwait:281/22 eventfd2:290/19"""
_PAIRS = "shutdown:48/210"  # of what socketpair made: no other socket can exist
_ITSELF = """mmap:9/222 munmap:11/215 mprotect:10/226 mremap:25/216 madvise:28/233 brk:12/214 futex:202/98
set_robust_list:273/99 get_robust_list:274/100 rseq:334/293 set_tid_address:218/96 membarrier:324/283
sched_yield:24/124 sched_getaffinity:204/123 getcpu:309/168 getpid:39/172 gettid:186/178 getppid:110/173
getuid:102/174 geteuid:107/175 getgid:104/176 getegid:108/177 getresuid:118/148 getresgid:120/150 getgroups:115/158
getpgid:121/155 getpgrp:111/- getsid:124/156 uname:63/160 sysinfo:99/179 getrlimit:97/163 getrusage:98/165
times:100/153 clock_gettime:228/113 clock_getres:229/114 gettimeofday:96/169 time:201/- nanosleep:35/101
clock_nanosleep:230/115 getitimer:36/102 setitimer:38/103 alarm:37/- pause:34/- getrandom:318/278 rt_sigaction:13/134
rt_sigprocmask:14/135 rt_sigreturn:15/139 rt_sigpending:127/136 rt_sigsuspend:130/133 rt_sigtimedwait:128/137
sigaltstack:131/132 restart_syscall:219/128 exit:60/93 exit_group:231/94"""
_BY_ARGUMENT = """open:2/- openat:257/56 fcntl:72/25 ioctl:16/29 prctl:157/167 prlimit64:302/261 clone:56/220
kill:62/129 tgkill:234/131 socketpair:53/199 sendto:44/206 recvfrom:45/207 close_range:436/436 seccomp:317/277"""
_INSTEAD = {
    # The folder goes with the program: there is nothing to wait for a disk for, in which no signal would end it.
    DONE: "fsync:74/82 fdatasync:75/83 msync:26/227",
    # It takes space without writing, faster than anybody can look. C libraries write instead.
    UNSUPPORTED: "fallocate:285/47",
}

AF_UNIX, SOCK_STREAM, SOCK_TYPE = 1, 1, 0xF
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
O_TRUNC, O_ACCMODE = 0o1000, 3
RLIMIT_STACK = 3
THREAD = CLONE_THREAD | CLONE_FILES
PLAINLY = (0, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_DONTWAIT | MSG_NOSIGNAL)
OWN_FLAGS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # F_DUPFD ... F_SETLKW, F_DUPFD_CLOEXEC
QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
NAMES = (15, 16)  # PR_SET_NAME, PR_GET_NAME


class Machine(NamedTuple):
    """What a kernel calls this kind of processor (linux/audit.h), and which column of the tables above is its."""

    audit: int
    column: int


MACHINES = {"x86_64": Machine(0xC000003E, 0), "aarch64": Machine(0xC00000B7, 1)}

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (in instructions to skip), operand."""


def machine() -> Machine | None:
    """This one; None if there are no tables for it."""
    return MACHINES.get(platform.machine())


def numbers(table: str, column: int) -> dict[str, int]:
    """System calls of a table by name, those that this kind of machine has.

    >>> numbers("read:0/63 open:2/-", 1)
    {'read': 63}
    """
    found = {name: entry.split("/")[column] for name, _, entry in (word.partition(":") for word in table.split())}
    return {name: int(number) for name, number in found.items() if number != "-"}


def program(machine: Machine, pid: int) -> list[Instruction]:
    """The filter of the process `pid`."""
    special = numbers(_BY_ARGUMENT, machine.column)
    rules = {
        # Threads, not processes, all with the same descriptors, which are limited. (clone3, which has its flags in
        # memory, where no filter can look, is a NEW one.)
        "clone": [_argument(0), (AND, 0, 0, THREAD), *_one_of([THREAD])],
        "close_range": [_argument(2), *_one_of([0])],  # not CLOSE_RANGE_UNSHARE
        # Plainly. Not as "out of band", which has been a way into the kernel.
        "sendto": [_argument(3), *_one_of(PLAINLY)],
        "recvfrom": [_argument(3), *_one_of(PLAINLY)],
        # Not F_SETOWN and F_SETSIG, with which a descriptor sends a signal to any process.
        "fcntl": [_argument(1), *_one_of(OWN_FLAGS)],
        "ioctl": [_argument(1), *_one_of(QUESTIONS)],
        "prctl": [_argument(0), *_one_of(NAMES)],
        # Any for its own stack, within its memory, as programs that recurse ask for. Else reading a limit: the new one,
        # a pointer of two halves, is null.
        "prlimit64": [
            *(_argument(0), (EQUAL, 0, 3, 0), _argument(1), (EQUAL, 0, 1, RLIMIT_STACK), (RETURN, 0, 0, ALLOW)),
            *(_argument(2), (EQUAL, 0, 1, 0), _argument(2, high=True), *_one_of([0])),
        ],
        "kill": [_argument(0), *_one_of([pid])],
        "tgkill": [_argument(0), *_one_of([pid])],
        # For asyncio. Of a datagram pair each end could send to any socket that has a name.
        "socketpair": [
            *(_argument(0), (EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, REFUSED)),
            *(_argument(1), (AND, 0, 0, SOCK_TYPE), *_one_of([SOCK_STREAM])),
        ],
    }
    # Before its third version Landlock does not see that a file which is opened for reading is emptied.
    for name, flags in (("open", 1), ("openat", 2)):
        rules[name] = [_argument(flags), (AND, 0, 0, O_TRUNC | O_ACCMODE), *_none_of([O_TRUNC, O_TRUNC | O_ACCMODE])]
    made: list[Instruction] = [
        *((LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, machine.audit), (RETURN, 0, 0, KILL)),
        *((LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSED)),
    ]
    tables = [(ALLOW, table) for table in (_FILES, _PAIRS, _ITSELF)] + list(_INSTEAD.items())
    for action, table in tables:
        for number in numbers(table, machine.column).values():
            made += [(EQUAL, 0, 1, number), (RETURN, 0, 0, action)]
    for name, rule in rules.items():
        if name in special:
            made += [(EQUAL, 0, len(rule), special[name]), *rule]
    return [*made, (AT_LEAST, 0, 1, NEW), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, REFUSED)]


def _argument(n: int, *, high: bool = False) -> Instruction:
    """Load the low (or high) half of the n-th argument, both machines being little-endian."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * n + 4 * high)


def _one_of(values: Sequence[int]) -> Iterable[Instruction]:
    """Allow if what was loaded is one of the values, refuse otherwise."""
    for value in values:
        yield from ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))
    yield (RETURN, 0, 0, REFUSED)


def _none_of(values: Sequence[int]) -> Iterable[Instruction]:
    for value in values:
        yield from ((EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSED))
    yield (RETURN, 0, 0, ALLOW)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))  # struct sock_fprog


def ask_seccomp() -> None:
    """Raise OSError if the kernel takes no filters."""
    here = machine()
    if here is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    action = ctypes.byref(ctypes.c_uint32(FAIL))
    call(numbers(_BY_ARGUMENT, here.column)["seccomp"], SECCOMP_GET_ACTION_AVAIL, 0, action)


def install(machine: Machine, pid: int) -> None:
    """Put this thread, and all that it will start, under the filter. It cannot be lifted. Needs no_new_privs. Raises
    OSError."""
    made = program(machine, pid)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in made)
    held = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(made), ctypes.cast(held, ctypes.c_void_p))
    call(numbers(_BY_ARGUMENT, machine.column)["seccomp"], SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(filter_))


def call(number: int, *arguments: object) -> int:
    """A system call by its number. Raises OSError."""
    wide = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    if (result := int(LIBC.syscall(ctypes.c_long(number), *wide))) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result
