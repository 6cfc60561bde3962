"""Slots for the states of recurrent layers: one per row, the others for snapshots that later requests can start from.

Pure bookkeeping over slot numbers, as ``pages`` is over page numbers; the tensors are in ``cache.StateCache``.
"""

from collections import OrderedDict
from dataclasses import dataclass

# Every slot is in exactly one of these states:
#
#   free          nothing kept
#   held          the state of a row, as long as the row lives; or, within a step, what is about to become a snapshot
#   snapshot      the state at the end of a registered page, known by the page's name; dropped when the page is evicted
#
# Keys and values of a prefix can be read from anywhere in it, a state only where it was saved. Where that is worth it
# is decided in ``scheduler``.


@dataclass
class RowState:
    """A request's part of the recurrent state while it has a row."""

    slot: int
    shared_end: int = 0  # so many tokens of it others computed before, but they left no state there
    answer_name: int = 0  # of the page at whose end its answer was saved last, 0: nowhere


@dataclass(frozen=True)
class Save:
    """An order: the state after a row's first ``position`` tokens goes to ``slot``."""

    position: int
    slot: int


@dataclass
class _Snapshot:
    slot: int
    used: bool = False  # by another than who took it


class StatePool:
    """Gives slots to rows, and keeps as many snapshots as the other slots hold; rows come first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end
        self._held: dict[int, None] = {}
        self._snapshots: OrderedDict[int, _Snapshot] = OrderedDict()  # by name of the page, in order of eviction

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def names(self) -> list[int]:
        """Of the pages that have a snapshot, the next to be evicted first."""
        return list(self._snapshots)

    def take(self) -> int | None:
        """A slot to hold, if need be that of the snapshot that comes first; None if rows hold them all."""
        if not self._free and self._snapshots:
            self.drop(next(iter(self._snapshots)))
        if not self._free:
            return None
        slot = self._free.pop()
        self._held[slot] = None
        return slot

    def give_back(self, slot: int) -> None:
        """A row is over, or a snapshot is not wanted."""
        del self._held[slot]
        self._free.append(slot)

    def find(self, name: int) -> int | None:
        """Where the state at the end of this page is."""
        snapshot = self._snapshots.get(name)
        return None if snapshot is None else snapshot.slot

    def use(self, name: int) -> None:
        """Somebody starts from this snapshot: it is the last to be evicted now, and nobody's own any more."""
        self._snapshots[name].used = True
        self._snapshots.move_to_end(name)

    def keep(self, name: int, slot: int, first_to_go: bool) -> None:
        """Makes a held slot the snapshot of a page; if the page has one, that stays."""
        if name in self._snapshots:
            self.give_back(slot)
            self.use(name)
            return
        del self._held[slot]
        self._snapshots[name] = _Snapshot(slot)
        self._snapshots.move_to_end(name, last=not first_to_go)

    def drop(self, name: int, unless_used: bool = False) -> None:
        """The page is evicted, or its snapshot is superseded. Pages without one are ignored."""
        snapshot = self._snapshots.get(name)
        if snapshot is not None and not (unless_used and snapshot.used):
            del self._snapshots[name]
            self._free.append(snapshot.slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        kept = [snapshot.slot for snapshot in self._snapshots.values()]
        assert sorted([*self._free, *self._held, *kept]) == list(range(self.num_slots)), "a slot in no or two states"
