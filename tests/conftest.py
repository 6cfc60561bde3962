"""Fixtures that the tests share; the tiny models themselves are in ``tiny``."""

from collections.abc import Iterator

import pytest
import torch

from lampejo.models.config import ModelConfig
from lampejo.models.layers import Target
from lampejo.ops.cpu import instruction_set
from tiny import TINY, TINY_HYBRID, TINY_NEXT, make_target

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much beside other work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first: begun last, it would leave all cores but one idle at the end."""
    items.sort(key=lambda item: item.path.name != "test_smollm2.py")


@pytest.fixture(scope="session")
def reference_target() -> Target:
    return make_target()


def on_kernels(config: ModelConfig) -> Target:
    if instruction_set() is None:
        pytest.skip("the CPU kernels were not built, or do not know this processor")
    return make_target(config, packed=True)


@pytest.fixture(scope="session")
def kernels_target() -> Target:
    return on_kernels(TINY)


@pytest.fixture(scope="session")
def kernels_hybrid_target() -> Target:
    return on_kernels(TINY_NEXT)


@pytest.fixture(scope="session")
def hybrid_target() -> Target:
    return make_target(TINY_HYBRID)


@pytest.fixture(params=["reference", "kernels", "hybrid", "kernels_hybrid"])
def target(request: pytest.FixtureRequest) -> Target:
    """A tiny target: on the reference operations and on the CPU kernels, without recurrent layers and with them; the
    last one has experts too."""
    return request.getfixturevalue(f"{request.param}_target")


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
