"""How long a model takes to load, and how much memory at its peak: `python scripts/load_memory.py MODEL`.

The peak is that of a fresh process with the default settings, less what importing PyTorch takes; beside it stands the
size of the packed matrices. The last line is JSON. Linux only: it reads /proc.
"""

import gc
import json
import re
import sys
from pathlib import Path

import torch  # noqa: F401  # its own memory is taken off


def peak_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


def main(model: str) -> None:
    before = peak_bytes()
    import lampejo
    from lampejo.ops.cpu.fused import PackedMatrix

    with lampejo.load(model) as llm:
        peak = peak_bytes() - before
        packed = sum(x.data.numel() for x in gc.get_objects() if type(x) is PackedMatrix)
        found = {
            "model": llm.info["model"],
            "load_s": round(llm.load_s, 1),
            "torch_mb": round(before / 1e6),
            "peak_mb": round(peak / 1e6),
            "packed_mb": round(packed / 1e6),
            "peak_over_packed": round(peak / packed, 2) if packed else None,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
