"""What users may import stays what it is, and everything can be imported."""

import importlib
import pkgutil

import pytest

import lampejo

MODULES = [m.name for m in pkgutil.walk_packages(lampejo.__path__, "lampejo.") if not m.name.endswith("__main__")]


def test_the_public_names_are_these():
    """Fault: a public name that comes or goes unnoticed."""
    assert lampejo.__all__ == [
        "LLM",
        "Chunk",
        "Completion",
        "Drafting",
        "EngineConfig",
        "Grammar",
        "SamplingParams",
        "StopParams",
        "UserError",
        "load",
    ]
    assert all(getattr(lampejo, name).__name__ == name for name in lampejo.__all__)
    assert set(lampejo.__all__) <= set(dir(lampejo))


def test_an_unknown_name_is_an_attribute_error():
    """Fault: names that are imported on use hide misspelt ones."""
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = lampejo.laod


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name):
    """Fault: a module that only works when another was imported before."""
    importlib.import_module(name)
