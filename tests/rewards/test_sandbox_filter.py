"""The filter of system calls, read as the kernel reads it: instruction by instruction."""

from __future__ import annotations

import struct

import pytest

from asyncrl.rewards.sandbox_filter import (
    ALLOW,
    AND,
    AT_LEAST,
    DONE,
    EQUAL,
    KILL,
    LOAD,
    MACHINES,
    REFUSED,
    RETURN,
    UNKNOWN,
    UNSUPPORTED,
    Machine,
    program,
)

PID = 4321
X86, ARM = MACHINES["x86_64"], MACHINES["aarch64"]
NUMBERS = {
    # (x86-64, aarch64), from the tables of the kernel's source
    **{"read": (0, 63), "openat": (257, 56), "futex": (202, 98), "fcntl": (72, 25), "ioctl": (16, 29)},
    **{"socket": (41, 198), "connect": (42, 203), "execve": (59, 221), "ptrace": (101, 117), "bpf": (321, 280)},
    **{"mount": (165, 40), "keyctl": (250, 219), "unshare": (272, 97), "io_uring_setup": (425, 425)},
    **{"process_vm_readv": (310, 270), "pidfd_getfd": (438, 438), "open_by_handle_at": (304, 265)},
    **{"clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "socketpair": (53, 199)},
    **{"prctl": (157, 167), "prlimit64": (302, 261), "truncate": (76, 45), "setsid": (112, 157), "tkill": (200, 130)},
    **{"fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227), "fallocate": (285, 47)},
    **{"sendto": (44, 206), "recvfrom": (45, 207), "close_range": (436, 436)},
    **{"memfd_create": (319, 279), "shmget": (29, 194), "sendmsg": (46, 211), "fchmodat": (268, 53)},
}


def verdict(machine: Machine, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter says of a system call."""
    data = struct.pack("=iIQ6Q", number, audit or machine.audit, 0, *(*arguments, *[0] * (6 - len(arguments))))
    made, at, register = program(machine, PID), 0, 0
    while True:
        code, when, otherwise, operand = made[at]
        at += 1
        if code == LOAD:
            (register,) = struct.unpack_from("=I", data, operand)
        elif code == AND:
            register &= operand
        elif code == RETURN:
            return operand
        else:
            holds = register == operand if code == EQUAL else register >= operand
            assert code in (EQUAL, AT_LEAST)
            at += when if holds else otherwise


def said(machine: Machine, name: str, *arguments: int) -> int:
    return verdict(machine, NUMBERS[name][machine.column], *arguments)


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def test_a_program_reads_computes_and_waits(machine: Machine) -> None:
    assert {said(machine, name) for name in ("read", "futex")} == {ALLOW}


def test_networks_processes_tracing_and_mounts_are_refused(machine: Machine) -> None:
    names = "socket connect execve ptrace bpf mount keyctl unshare process_vm_readv"
    names += " open_by_handle_at truncate setsid tkill memfd_create shmget sendmsg fchmodat"
    assert {name: said(machine, name) for name in names.split()} == dict.fromkeys(names.split(), REFUSED)


def test_a_newer_call_is_refused_as_an_older_kernel_would(machine: Machine) -> None:
    names = ("clone3", "io_uring_setup", "pidfd_getfd")
    assert {said(machine, name) for name in names} | {verdict(machine, 5000)} == {UNKNOWN}


def test_threads_can_be_made_and_processes_cannot(machine: Machine) -> None:
    pthread_create = 0x3D0F00
    assert said(machine, "clone", pthread_create) == ALLOW
    assert said(machine, "clone", 17) == REFUSED


def test_all_threads_have_the_same_descriptors_whose_number_is_limited(machine: Machine) -> None:
    clone_files, unshare = 0x400, 2
    assert said(machine, "clone", 0x3D0F00 & ~clone_files) == REFUSED
    assert [said(machine, "close_range", 3, 9, flags) for flags in (0, unshare)] == [ALLOW, REFUSED]


def test_nothing_waits_for_a_disk_and_no_space_is_taken_without_writing(machine: Machine) -> None:
    assert {said(machine, name) for name in ("fsync", "fdatasync", "msync")} == {DONE}
    assert said(machine, "fallocate") == UNSUPPORTED


def test_what_a_socket_pair_sends_is_plain(machine: Machine) -> None:
    out_of_band, without_signal = 1, 0x4000
    for name in ("sendto", "recvfrom"):
        assert [said(machine, name, 3, 0, 1, flags) for flags in (0, without_signal)] == [ALLOW, ALLOW]
        assert said(machine, name, 3, 0, 1, out_of_band) == REFUSED


def test_signals_reach_the_process_itself_and_no_other(machine: Machine) -> None:
    for name in ("kill", "tgkill"):
        assert said(machine, name, PID, 6) == ALLOW
        assert {said(machine, name, other, 9) for other in (0, 1, PID + 1, 2**64 - 1)} == {REFUSED}


def test_a_descriptor_cannot_be_made_to_send_signals(machine: Machine) -> None:
    f_setfl, f_setown, f_setsig, f_dupfd_cloexec, f_setown_ex = 4, 8, 10, 1030, 15
    assert {said(machine, "fcntl", 3, command) for command in (f_setfl, f_dupfd_cloexec)} == {ALLOW}
    assert {said(machine, "fcntl", 3, command) for command in (f_setown, f_setsig, f_setown_ex)} == {REFUSED}
    tcgets, tiocsti, fiosetown = 0x5401, 0x5412, 0x8901
    assert [said(machine, "ioctl", 3, request) for request in (tcgets, tiocsti, fiosetown)] == [ALLOW, REFUSED, REFUSED]


def test_a_file_that_is_opened_for_reading_cannot_be_emptied(machine: Machine) -> None:
    o_trunc = 0o1000
    flags = {0: ALLOW, 1: ALLOW, o_trunc | 1: ALLOW, o_trunc | 2: ALLOW, o_trunc: REFUSED, o_trunc | 3: REFUSED}
    assert {flag: said(machine, "openat", 0, 0, flag) for flag in flags} == flags


def test_limits_can_be_read_and_not_set(machine: Machine) -> None:
    assert said(machine, "prlimit64", 0, 7, 0, 0x7FFF_0000_0000) == ALLOW
    assert {said(machine, "prlimit64", 0, 7, pointer) for pointer in (1, 1 << 32, 0x7FFF_0000_1234)} == {REFUSED}


def test_of_limits_only_that_of_the_own_stack_can_be_set(machine: Machine) -> None:
    stack, memory, pointer = 3, 9, 0x7FFF_0000_1234
    assert said(machine, "prlimit64", 0, stack, pointer) == ALLOW
    assert {said(machine, "prlimit64", *whose, pointer) for whose in ((0, memory), (PID, stack), (1, stack))} == {
        REFUSED
    }


def test_the_signal_for_the_parents_death_stays_set(machine: Machine) -> None:
    pr_set_pdeathsig, pr_set_name = 1, 15
    assert [said(machine, "prctl", option) for option in (pr_set_pdeathsig, pr_set_name)] == [REFUSED, ALLOW]


def test_socket_pairs_are_of_streams(machine: Machine) -> None:
    af_unix, af_inet, stream, datagram, cloexec = 1, 2, 1, 2, 0o2000000
    assert said(machine, "socketpair", af_unix, stream | cloexec) == ALLOW
    assert said(machine, "socketpair", af_unix, datagram) == REFUSED
    assert said(machine, "socketpair", af_inet, stream) == REFUSED


def test_another_interface_of_the_same_machine_is_refused() -> None:
    assert verdict(X86, 0x40000000) == REFUSED  # x32
    assert verdict(X86, 0, audit=0x40000003) == KILL  # 32-bit programs
    assert verdict(ARM, 63, audit=X86.audit) == KILL
