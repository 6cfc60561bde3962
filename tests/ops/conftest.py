"""Fixtures of the tests of operations."""

from collections.abc import Iterator

import pytest

from lampejo.ops.cpu import instruction_set
from lampejo.ops.cpu.library import LIBRARY


@pytest.fixture(params=["avx512vnni", "avx2", "neondot", "neon"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine can run."""
    chosen = instruction_set()
    assert LIBRARY is not None and chosen is not None
    if not LIBRARY.lampejo_force_isa(request.param.encode()):
        pytest.skip(f"this machine does not run {request.param}")
    yield request.param
    LIBRARY.lampejo_force_isa(chosen.encode())
