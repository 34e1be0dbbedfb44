"""System calls that confined processes may not make, or may apply only to themselves.

Each name has the numbers on x86-64 and aarch64 from Linux's asm/unistd_64.h and asm-generic/unistd.h. None: the
machine does not have the call.
"""

from __future__ import annotations

SystemCalls = dict[str, tuple[int | None, int | None]]

PRETENDED: SystemCalls = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
"""Calls that change metadata of files without opening them. Landlock does not restrict these calls.

In confined processes they do nothing and report success.
"""
REFUSED: SystemCalls = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "unshare": (272, 97), "setns": (308, 268), "socket": (41, 198),
}  # fmt: skip
"""Calls that fail with EPERM.

They change attributes of files, access memory or priorities of other processes, use shared memory, queues or keys, or
trace processes. They also use BPF, io_uring, namespaces or network sockets. For socket pairs see `SOCKET_PAIR`.
"""
OF_ITSELF: SystemCalls = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
"""Calls on limits and scheduling whose first argument is a process. Only 0, the calling process, is allowed."""
SOCKET_PAIR: SystemCalls = {"socketpair": (53, 199)}
SIGNAL_ITSELF: SystemCalls = {"kill": (62, 129), "tgkill": (234, 131)}
"""Calls that send a signal. If Landlock does not restrict signals (before ABI 6), only signals to the process itself
are allowed."""
SIGNAL_OTHERS: SystemCalls = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424)
}  # fmt: skip
"""Other calls that send a signal. They are refused before ABI 6."""
