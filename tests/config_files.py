"""What tests of configurations share: parts of files, and values that could stand anywhere in them."""

from hypothesis import strategies as st

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}
