"""When the scheduler saves recurrent states, and who starts from them."""

import pytest

from test_scheduler import PAGE, make_scheduler, positions, request_of, step
from tiny import make_request


def test_a_prompt_saves_its_state_at_chunk_ends_and_at_its_own_end():
    """M1: the same prompt again starts from the last page end that leaves a token to compute."""
    scheduler = make_scheduler(num_slots=20)
    request = request_of(150)
    scheduler.add(request)
    assert [positions(step(scheduler)[0].saves) for _ in range(3)] == [[64], [128], [144]]
    scheduler.remove(request)
    again = request_of(150)
    scheduler.add(again)
    (row,) = step(scheduler)
    assert again.num_cached == 144 and row.load is not None
    assert positions(row.saves) == [], "nothing new to save"


def test_a_prompt_in_one_chunk_saves_its_state_in_the_middle_of_it():
    """Fault: a step more for each prompt, only because its end lies within a page."""
    scheduler = make_scheduler(num_slots=20)
    scheduler.add(request_of(45))
    (row,) = step(scheduler)
    assert (row.num_known, positions(row.saves)) == (45, [40])


def test_a_prompt_that_fills_its_pages_saves_before_its_last_page_and_after_it():
    """M1, M2: the same prompt again needs a token to compute, the next turn can start after all of it."""
    scheduler = make_scheduler(num_slots=20)
    scheduler.add(request_of(48))
    assert positions(step(scheduler)[0].saves) == [40, 48]


@pytest.mark.parametrize("width", [0, 3, 20])
def test_an_answer_keeps_only_its_latest_state(width):
    """M2: the next turn starts from the last page end, and a long answer does not fill all slots."""
    scheduler = make_scheduler(num_slots=20)
    request = request_of(13)
    scheduler.add(request)
    while len(request.ids) < 100:
        step(scheduler, width, num_accepted=width)
    assert scheduler.states.num_held == 1
    last = request.num_computed // PAGE * PAGE
    names = {scheduler.pool.name_at(request.pages, end): end for end in range(PAGE, last + 1, PAGE)}
    assert [names[name] for name in scheduler.states.names] == [8, last]


def test_a_state_that_another_request_started_from_stays():
    """Fault: an answer goes on and takes away what a second conversation on its text would start from."""
    scheduler = make_scheduler(num_slots=20)
    first = request_of(13)
    scheduler.add(first)
    while len(first.ids) < 34:
        step(scheduler)
    second = make_request([*first.ids, 50, 51])
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached == 32
    while len(first.ids) < 60:
        step(scheduler)
    assert scheduler.states.find(scheduler.pool.name_at(first.pages, 32)) is not None


def test_a_common_beginning_is_saved_when_it_comes_the_second_time():
    """Fault: agents share a long system prompt, and each computes it anew, since nobody's chunk ended with it."""
    scheduler = make_scheduler(num_slots=20)
    requests = [make_request([*range(2, 45), 90 + i, *range(60 + i, 70)]) for i in range(3)]
    cached = []
    for request in requests:
        scheduler.add(request)
        saves = positions(step(scheduler)[0].saves)
        assert saves == ([40, 48] if len(cached) == 1 else [48])
        cached.append(request.num_cached)
        scheduler.remove(request)
    assert cached == [0, 0, 40]


def test_states_are_saved_only_in_slots_that_rows_leave():
    """Fault: a request without a slot. With as many rows as slots nothing is kept, and all goes on."""
    scheduler = make_scheduler(num_slots=2, max_rows=2)
    requests = [request_of(30, first_id=40 * i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    plan = step(scheduler)
    assert [positions(row.saves) for row in plan] == [[], []] and scheduler.states.names == []
    scheduler.remove(requests[0])
    scheduler.remove(requests[1])
    plan = step(scheduler)
    assert [positions(row.saves) for row in plan] == [[24]]
    again = request_of(30, first_id=80)
    scheduler.add(again)
    (_, row) = step(scheduler)  # takes the slot of the very state that it starts from
    assert again.num_cached == 24 and row.load == again.state.slot


def test_a_preempted_request_returns_to_its_latest_state():
    """M4: it gives its slot back, and what it has to compute anew is short."""
    scheduler = make_scheduler(num_pages=8, max_context=64, num_slots=10)
    old, young = request_of(25, 2), request_of(25, 40)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    while young in scheduler.running:
        step(scheduler)
    assert young.state is None and scheduler.states.num_held == 1
    scheduler.remove(old)
    (row,) = step(scheduler)
    assert row.load is not None and row.num_known <= 2 * PAGE
