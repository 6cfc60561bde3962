"""CPU kernels: C++ behind ctypes, without torch headers. Absent where the package was built without a compiler."""

from lampejo.ops.cpu.library import LIBRARY


def instruction_set() -> str | None:
    """What the kernels were chosen for at run time ("avx512vnni", "avx2", "neon"); None: the reference has to do."""
    if LIBRARY is None:
        return None
    name = LIBRARY.lampejo_isa()
    return name.decode() if name else None


def set_threads(num_threads: int) -> None:
    """Threads of the kernels, the calling one included."""
    if LIBRARY is not None and LIBRARY.lampejo_get_threads() != num_threads:
        LIBRARY.lampejo_set_threads(num_threads)
