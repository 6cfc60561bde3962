"""Fixtures that the tests share; the tiny models themselves are in ``tiny``."""

from collections.abc import Iterator

import pytest
import torch

from lampejo.models.llama import Llama
from tiny import make_target

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much beside other work


@pytest.fixture(scope="session")
def target() -> Llama:
    return make_target()


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
