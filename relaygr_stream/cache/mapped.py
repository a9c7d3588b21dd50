"""What a mapping does not say of its file: that the disk does not give a page, or has lost one that was written. Linux
alone is asked.

An access to the former is a bus error. The latter is read as it was before, once Linux has dropped the page.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Final

MADV_POPULATE_READ: Final = 22
SYNC_FILE_RANGE_WAIT_BEFORE: Final = 1
#: What becomes of written pages otherwise is that they are written.
LOST: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)


def why_absent(address: int, nbytes: int) -> str:
    """Have these pages in memory. Returns why some cannot be; "": they are, or that cannot be told (Linux < 5.14)."""
    if sys.platform != "linux":
        return ""
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MADV_POPULATE_READ) == 0:
        return ""
    found = ctypes.get_errno()
    return "" if found == errno.EINVAL else os.strerror(errno.EIO if found == errno.EFAULT else found)


def why_lost(fd: int, nbytes: int) -> str:
    """Why pages of an open file of so many bytes were lost since this was asked last; "": none was.

    Waits for the pages behind its end: there are none.
    """
    if sys.platform != "linux":
        return ""
    behind, one = ctypes.c_int64(nbytes), ctypes.c_int64(1)
    if _libc.sync_file_range(fd, behind, one, SYNC_FILE_RANGE_WAIT_BEFORE) == 0:
        return ""
    return os.strerror(found) if (found := ctypes.get_errno()) in LOST else ""
