"""Fixtures that the tests share; the tiny models themselves are in ``tiny``."""

from collections.abc import Iterator

import pytest
import torch

from lampejo.models.llama import Llama
from lampejo.ops.cpu import instruction_set
from tiny import make_target

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much beside other work


@pytest.fixture(scope="session")
def reference_target() -> Llama:
    return make_target()


@pytest.fixture(scope="session")
def packed_target() -> Llama:
    if instruction_set() is None:
        pytest.skip("the CPU kernels were not built, or do not know this processor")
    return make_target(packed=True)


@pytest.fixture(params=["reference", "kernels"])
def target(request: pytest.FixtureRequest) -> Llama:
    """A tiny target, once on the reference operations and once on the CPU kernels."""
    return request.getfixturevalue("reference_target" if request.param == "reference" else "packed_target")


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
