"""Print the NVIDIA GPUs of this machine; exit with status 1 and the reason if there are none.

Needs no packages, because `make gpu` runs it before the build.
"""

import ctypes
import sys

Gpus = list[str]


def find() -> tuple[Gpus, str]:
    """Return the names of the GPUs; or none, and why."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "there is no NVIDIA driver here (libcuda.so.1)"
    if status := driver.cuInit(0):
        return [], f"the NVIDIA driver finds no GPU (cuInit: error {status})"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    name = ctypes.create_string_buffer(256)
    names = []
    for ordinal in range(count.value):
        driver.cuDeviceGetName(name, len(name), ordinal)
        names.append(name.value.decode())
    return names, "" if names else "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES?)"


def require() -> Gpus:
    """Return the names; without a GPU end the program."""
    names, refusal = find()
    if not names:
        sys.exit(f"Nothing was run: {refusal}.")
    return names


if __name__ == "__main__":
    print("GPUs:", ", ".join(require()))
