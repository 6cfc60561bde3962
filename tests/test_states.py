"""Slots for recurrent states: none is lost, none has two owners, and the right snapshots go first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lampejo.states import StatePool


def pool_with(*names: int, num_slots: int = 4) -> StatePool:
    """A pool with snapshots of these pages, in this order."""
    pool = StatePool(num_slots)
    for name in names:
        keep(pool, name)
    return pool


def keep(pool: StatePool, name: int, first_to_go: bool = False) -> int:
    slot = pool.take()
    assert slot is not None
    pool.keep(name, slot, first_to_go)
    pool.check_integrity()
    return slot


def test_rows_take_the_slots_of_snapshots_the_least_recently_used_first():
    """Fault: a request has to wait, or fails, because cached prefixes fill all slots."""
    pool = pool_with(1, 2, 3, 4)
    slots = {name: pool.find(name) for name in (1, 2, 3, 4)}
    pool.use(1)
    assert [pool.take() for _ in range(5)] == [slots[2], slots[3], slots[4], slots[1], None]
    assert pool.names == [] and pool.num_held == 4


def test_free_slots_are_taken_before_those_of_snapshots():
    """Fault: snapshots are thrown away while slots lie idle."""
    pool = pool_with(1, 2)
    for _ in range(2):
        pool.take()
    assert pool.names == [1, 2]


def test_ends_of_chunks_never_drive_out_what_conversations_left():
    """Fault: one prompt of forty chunks empties the prefix cache of everybody else."""
    pool = pool_with(1, 2)
    for name in range(10, 50):
        keep(pool, name, first_to_go=True)
    assert pool.names == [49, 10, 1, 2], "the first chunks stay, the later ones take each other's place"


def test_a_snapshot_that_somebody_started_from_goes_last():
    """Fault: the system prompt of all requests is evicted as the end of somebody's chunk."""
    pool = pool_with(1)
    keep(pool, 2, first_to_go=True)
    pool.use(2)
    assert pool.names == [1, 2]


def test_a_superseded_snapshot_stays_if_others_used_it():
    """Fault: an answer goes on, and takes away the state that another request's prefix ends with."""
    pool = pool_with(1, 2)
    pool.use(2)
    pool.drop(1, unless_used=True)
    pool.drop(2, unless_used=True)
    pool.drop(99, unless_used=True)
    assert pool.names == [2]
    pool.drop(2)
    assert pool.names == []
    pool.check_integrity()


def test_a_page_has_one_snapshot():
    """Fault: two requests compute one prefix side by side, and the slot of one copy is lost."""
    pool = pool_with(1)
    first = pool.find(1)
    keep(pool, 1)
    assert pool.find(1) == first and pool.num_held == 0
    pool.drop(1, unless_used=True)
    assert pool.names == [1], "two requests used it"


def test_giving_a_slot_back_twice_is_noticed():
    """Fault: one slot goes to two rows, which then write each other's state."""
    pool = StatePool(2)
    slot = pool.take()
    assert slot is not None
    pool.give_back(slot)
    with pytest.raises(KeyError):
        pool.give_back(slot)


class PoolAgainstNaiveModel(RuleBasedStateMachine):
    """The model is a list of held slots and a list of names in order of eviction, with their slots."""

    SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(self.SLOTS)
        self.held: list[int] = []
        self.order: list[tuple[int, int, bool]] = []  # name, slot, used by others

    @rule()
    def take(self) -> None:
        slot = self.pool.take()
        if slot is None:
            assert len(self.held) == self.SLOTS
            return
        assert slot not in self.held
        if len(self.held) + len(self.order) == self.SLOTS:
            assert slot == self.order.pop(0)[1]
        assert slot not in [s for _, s, _ in self.order]
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(name=st.integers(1, 6), first_to_go=st.booleans())
    def keep(self, name: int, first_to_go: bool) -> None:
        slot = self.held.pop(0)
        self.pool.keep(name, slot, first_to_go)
        if name in [n for n, _, _ in self.order]:
            self.to_the_end(name)
        else:
            self.order.insert(0 if first_to_go else len(self.order), (name, slot, False))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n, _, _ in self.order]))
        self.pool.use(name)
        self.to_the_end(name)

    @rule(name=st.integers(1, 6), unless_used=st.booleans())
    def drop(self, name: int, unless_used: bool) -> None:
        self.pool.drop(name, unless_used)
        self.order = [entry for entry in self.order if entry[0] != name or (unless_used and entry[2])]

    def to_the_end(self, name: int) -> None:
        slot = next(s for n, s, _ in self.order if n == name)
        self.order = [*(entry for entry in self.order if entry[0] != name), (name, slot, True)]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_held == len(self.held)
        assert self.pool.names == [name for name, _, _ in self.order]
        assert all(self.pool.find(name) == slot for name, slot, _ in self.order)


PoolAgainstNaiveModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAgainstNaiveModel = PoolAgainstNaiveModel.TestCase
