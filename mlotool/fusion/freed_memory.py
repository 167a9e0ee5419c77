"""The memory that a process frees stays its own."""

import ctypes

# Numbers of mallopt's parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees for what it allocates next; say whether that was possible.

    The allocator of Linux (glibc) asks the system anew for each block above 32 MiB, and gives it back at once. Every
    page of it is then cleared and mapped when it is first written to, which takes up to five times as long as what an
    elementwise kernel does with it. Tensors of many runs in one are often so large.

    The process keeps its largest use of memory until it ends. Nothing happens with other allocators, and on a GPU
    torch has one of its own, which does the same.

    Source: man 3 mallopt.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(set_option(_MMAP_THRESHOLD, 2**30)) and bool(set_option(_TRIM_THRESHOLD, 2**31 - 1))
