"""What every framework shares below its API: libcgx by ctypes, calls, launchers, the process."""
