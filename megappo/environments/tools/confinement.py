"""Confines a process that runs model output to a folder, with Landlock for files and seccomp for other system calls.

Neither mechanism needs privileges or a setting of the machine. Both also apply to all child processes. Linux 6.2 or
newer is required, because older versions of Landlock do not restrict truncation of files. This module uses only the
standard library, because workers import it at their start.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from megappo.environments.tools.system_calls import (
    OF_ITSELF,
    PRETENDED,
    REFUSED,
    SIGNAL_ITSELF,
    SIGNAL_OTHERS,
    SOCKET_PAIR,
    SystemCalls,
)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
# versions of Landlock that added restrictions of truncation (Linux 6.2), TCP, ioctl of devices, and signals
_OLDEST_ABI, _NETWORK_ABI, _DEVICES_ABI, _SIGNALS_ABI = 3, 4, 5, 6
_EXECUTE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_EVERYTHING = (1 << 15) - 1
_DEVICES = 1 << 15
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
_NETWORK, _SIGNALS = 0b11, 0b11
_READABLE = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
    "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/ssl/certs", "/dev/zero", "/dev/random", "/dev/urandom",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu",
)  # fmt: skip
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _FILTER = 38, 22, 24, 2
_CAPABILITIES, _CAPABILITY_VERSION = 64, 0x20080522
_LOAD, _IS, _IS_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_AT, _SECOND_AT = 0, 4, 16, 24
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OTHER_ABI = 0x40000000
"""Bit that is set in the system call numbers of x86-64's x32 ABI."""
_STREAM, _KIND_OF_SOCKET = 1, 0xF
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@cache
def landlock_abi() -> int:
    """Return the version of the Landlock ABI. 0 without Landlock, or without a table of system calls for this
    machine."""
    if platform.machine() not in _MACHINES or sys.platform != "linux":
        return 0
    with suppress(OSError):
        return _call(_CREATE_RULESET, None, 0, 1)
    return 0


def why_not() -> str:
    """Return the reason why processes cannot be confined on this machine, or ""."""
    abi = landlock_abi()
    if abi >= _OLDEST_ABI:
        return ""
    state = f"has version {abi} of Landlock" if abi else "has no Landlock"
    return f"{platform.system()} {platform.release()} on {platform.machine()} {state}, and {_OLDEST_ABI} is needed"


def confine(folder: str, *, most_abi: int = 99) -> None:
    """Confine this process and its children permanently.

    The process can write only in `folder`, and can read the interpreter and the system's programs. It has no network,
    no access to other processes and no capabilities. `most_abi`: newest version of Landlock to use, for tests. Raises
    OSError if the process cannot be confined.
    """
    abi = min(landlock_abi(), most_abi)
    if abi < _OLDEST_ABI:
        raise OSError(errno.ENOSYS, why_not())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    _restrict_files(folder, abi)
    _prctl(_PR_SET_SECCOMP, _FILTER, _program(abi))


def _restrict_files(folder: str, abi: int) -> None:
    handled = _EVERYTHING | (_DEVICES if abi >= _DEVICES_ABI else 0)
    attributes = struct.pack(
        "QQQ", handled, _NETWORK if abi >= _NETWORK_ABI else 0, _SIGNALS if abi >= _SIGNALS_ABI else 0
    )
    size = 24 if abi >= _SIGNALS_ABI else 16 if abi >= _NETWORK_ABI else 8
    rules = _call(_CREATE_RULESET, attributes[:size], size, 0)
    try:
        own = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(__file__).resolve().parents[2])}
        for path in sorted(own.union(_READABLE)):
            _allow(rules, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
        _allow(rules, os.devnull, _READ_FILE | _WRITE_FILE | _TRUNCATE)
        _allow(rules, folder, handled)
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # the path does not exist on this machine
        return
    try:
        access = access if os.path.isdir(path) else access & _OF_FILES
        _call(_ADD_RULE, rules, 1, struct.pack("=Qi", access, place), 0)
    finally:
        os.close(place)


def _drop_capabilities() -> None:
    """Drop all capabilities. Root in a container has capabilities."""
    for capability in range(_CAPABILITIES):
        with suppress(OSError):
            _prctl(_PR_CAPBSET_DROP, capability)
    none = struct.pack("6I", *[0] * 6)
    if _libc().capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), none):
        raise OSError(ctypes.get_errno(), "capabilities are not dropped")


def _program(abi: int) -> ctypes.Array[ctypes.c_char]:
    """Return the system call filter as BPF."""
    machine = platform.machine()
    steps = [_step(_LOAD, _MACHINE_AT), _step(_IS, _MACHINES[machine], 1, 0), _step(_RETURN, _KILL)]
    steps += [_step(_LOAD, _NUMBER_AT)]
    if machine == "x86_64":
        steps += [_step(_IS_SET, _OTHER_ABI, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]
    refused = {**REFUSED, **(SIGNAL_OTHERS if abi < _SIGNALS_ABI else {})}
    steps += _each(PRETENDED, [_step(_RETURN, _FAIL)])
    steps += _each(refused, [_step(_RETURN, _FAIL | errno.EPERM)])
    steps += _each(OF_ITSELF, _only(_FIRST_AT, 0))
    if abi < _SIGNALS_ABI:
        steps += _each(SIGNAL_ITSELF, _only(_FIRST_AT, os.getpid()))
    steps += _each(SOCKET_PAIR, _only(_SECOND_AT, _STREAM, _KIND_OF_SOCKET))
    body = b"".join([*steps, _step(_RETURN, _ALLOW)])
    buffer = ctypes.create_string_buffer(body, len(body))
    header = struct.pack("HxxxxxxP", len(body) // 8, ctypes.addressof(buffer))
    program = ctypes.create_string_buffer(header, len(header))
    _BUFFERS.append(buffer)
    return program


_BUFFERS: list[ctypes.Array[ctypes.c_char]] = []
"""Memory that the kernel reads by address. References prevent deallocation."""


def _only(place: int, value: int, mask: int = 0xFFFFFFFF) -> list[bytes]:
    """Return steps that allow a call if an argument has this value, and refuse the call otherwise."""
    return [
        _step(_LOAD, place), _step(0x54, mask), _step(_IS, value, 1, 0),
        _step(_RETURN, _FAIL | errno.EPERM), _step(_RETURN, _ALLOW),
    ]  # fmt: skip


def _each(calls: SystemCalls, then: list[bytes]) -> list[bytes]:
    """Return steps that apply `then` to these system calls and skip `then` for other calls."""
    numbers = [pair[[*_MACHINES].index(platform.machine())] for pair in calls.values()]
    known = [number for number in numbers if number is not None]
    return [step for number in known for step in (_step(_IS, number, 0, len(then)), *then)]


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, if_not, value)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | bytes | None) -> int:
    result: int = _libc().syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(option: int, *values: int | ctypes.Array[ctypes.c_char]) -> None:
    if _libc().prctl(option, *values, *[0] * (4 - len(values))):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")
