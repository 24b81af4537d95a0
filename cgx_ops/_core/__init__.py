"""The code that all frameworks share: ctypes for libcgx, calls, launchers, the process."""
