"""Who takes part in a step, with how many tokens: pure bookkeeping, no model. Each test plays the engine's part."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lampejo.pages import PagePool
from lampejo.request import Request, StopParams
from lampejo.scheduler import ScheduledRow, Scheduler
from lampejo.states import Save, StatePool
from tiny import make_request

PAGE = 8
Widths = Callable[[Sequence[Request]], Sequence[int]]


def wanting(width: int) -> Widths:
    return lambda requests: [width] * len(requests)


def make_scheduler(
    num_pages: int = 100, max_rows: int = 8, token_budget: int = 64, max_context: int = 200, num_slots: int = 0
) -> Scheduler:
    """``num_slots``: for recurrent states, 0: the target has none."""
    states = StatePool(num_slots) if num_slots else None
    return Scheduler(PagePool(num_pages, PAGE, states), max_rows, token_budget, max_context)


def request_of(num_prompt: int, first_id: int = 2, max_tokens: int | None = None) -> Request:
    return make_request(range(first_id, first_id + num_prompt), StopParams(max_tokens=max_tokens))


def play(scheduler: Scheduler, plan: Sequence[ScheduledRow], num_accepted: int = 0) -> None:
    """What the engine does with a plan: each row that reaches its end gets its accepted drafts and one token more."""
    for row in plan:
        request, before = row.request, row.request.num_computed
        if row.wants_logits:
            request.ids += [1] * (min(num_accepted, row.width) + 1)
            request.num_computed = len(request.ids) - 1
        else:
            request.num_computed += row.num_known
        scheduler.committed(row, request.num_computed - before)


def step(scheduler: Scheduler, width: int = 0, num_accepted: int = 0) -> list[ScheduledRow]:
    plan = scheduler.schedule(wanting(width))
    check(scheduler, plan)
    play(scheduler, plan, num_accepted)
    return plan


def check(scheduler: Scheduler, plan: Sequence[ScheduledRow]) -> None:
    """What holds for every plan."""
    assert sum(row.num_known + row.width for row in plan) <= scheduler.token_budget
    assert len({row.request.id for row in plan}) == len(plan)
    assert len(scheduler.running) <= scheduler.max_rows
    for row in plan:
        assert row.request in scheduler.running
        assert row.num_known >= 1
        assert row.width == 0 or row.wants_logits
        end = row.request.num_computed + row.num_known + row.width
        assert end <= len(row.request.pages) * PAGE, "a token has no page"
        assert end <= scheduler.max_context
    held = [page for request in scheduler.running for page in request.pages]
    for row in plan:
        first, last = row.request.num_computed, row.request.num_computed + row.num_known + row.width - 1
        written = row.request.pages[first // PAGE : last // PAGE + 1]
        assert all(held.count(page) == 1 for page in written), "a page that is written has two owners"
    assert all(not request.pages and not request.num_computed for request in scheduler.waiting)
    scheduler.pool.check_integrity()
    if scheduler.states is not None:
        check_states(scheduler, plan)


def check_states(scheduler: Scheduler, plan: Sequence[ScheduledRow]) -> None:
    """What holds for every plan of a target with recurrent layers."""
    assert scheduler.states is not None
    slots = [request.state.slot for request in scheduler.running if request.state is not None]
    assert len(slots) == len(scheduler.running), "a row without a state"
    assert all(request.state is None for request in scheduler.waiting), "a state without a row"
    saves = [save for row in plan for save in row.saves]
    held = slots + [save.slot for save in saves]
    assert len(set(held)) == len(held) == scheduler.states.num_held, "a slot with two owners, or one too many"
    for row in plan:
        start, ends = row.request.num_computed, positions(row.saves)
        assert row.load is None or start > 0
        assert ends == sorted(ends) and all(start < end <= start + row.num_known for end in ends)
        assert not ends or row.width == 0, "which drafts are accepted is not known yet"
        assert all(end % PAGE == 0 for end in ends)


def positions(saves: Sequence[Save]) -> list[int]:
    return [save.position for save in saves]


def shape(plan: Sequence[ScheduledRow]) -> list[tuple[int, int, int]]:
    return [(row.request.id, row.num_known, row.width) for row in plan]


def test_a_prompt_is_prefilled_in_chunks_of_the_budget_and_then_decoded():
    scheduler = make_scheduler()
    request = request_of(150)
    scheduler.add(request)
    assert [shape(step(scheduler)) for _ in range(4)] == [
        [(request.id, 64, 0)],
        [(request.id, 64, 0)],
        [(request.id, 22, 0)],
        [(request.id, 1, 0)],
    ]


def test_decoding_rows_always_go_and_prefill_gets_what_they_leave():
    """A long prompt must not stop those who are reading their answers."""
    scheduler = make_scheduler(token_budget=16)
    readers = [request_of(4, first_id=10 * i) for i in range(1, 4)]
    for request in readers:
        scheduler.add(request)
    step(scheduler)
    long = request_of(100, first_id=50)
    scheduler.add(long)
    for _ in range(5):
        assert shape(step(scheduler)) == [(r.id, 1, 0) for r in readers] + [(long.id, 13, 0)]


@pytest.mark.parametrize("width", [0, 9])
def test_chunks_beside_readers_are_small_and_alone_they_are_large(width):
    """Fault: with a budget for prefill alone, every reader stops for seconds whenever somebody brings a long prompt."""
    scheduler = make_scheduler(token_budget=64)
    scheduler.chunk_beside = 10
    reader, long, other = request_of(4, max_tokens=90), request_of(100, first_id=50), request_of(30, first_id=160)
    scheduler.add(reader)
    step(scheduler)
    scheduler.add(long)
    scheduler.add(other)
    for _ in range(5):
        assert shape(step(scheduler, width)) == [(reader.id, 1, width), (long.id, 5, 0), (other.id, 5, 0)]
    scheduler.remove(reader)
    assert shape(step(scheduler, width)) == [(long.id, 59, 0), (other.id, 5, 0)]


def steps_to_first_token(scheduler: Scheduler, request: Request) -> int:
    num_steps = 0
    while not request.num_output:
        step(scheduler)
        num_steps += 1
        assert num_steps < 1000
    return num_steps


def test_a_short_prompt_beside_a_long_one_soon_has_its_first_token():
    """Fault: thirty tokens wait until a document of thousands has been read."""
    scheduler = make_scheduler(num_pages=300, max_context=2000)
    long, next_long, short = request_of(1000), request_of(1000, 1100), request_of(30, 2200)
    scheduler.add(long)
    step(scheduler)
    scheduler.add(next_long)
    scheduler.add(short)
    plan = step(scheduler)
    assert shape(plan) == [(long.id, 34, 0), (short.id, 30, 0)]
    assert short.num_output == 1 and next_long in scheduler.waiting


def test_a_long_prompt_advances_while_short_ones_keep_coming():
    """Half of each step is the oldest's, and in its time the next one's."""
    scheduler = make_scheduler(num_pages=300, max_context=2000)
    longs = [request_of(1000), request_of(1000, 1100)]
    for request in longs:
        scheduler.add(request)
    num_steps = num_short = 0
    while not longs[1].num_output:
        for _ in range(3):
            num_short += 1
            scheduler.add(request_of(60, 3000 + 60 * num_short))
        plan = step(scheduler)
        assert sum(row.num_known for row in plan) == scheduler.token_budget
        for row in plan:
            if row.request not in longs and row.request.num_output:
                scheduler.remove(row.request)
        num_steps += 1
    assert num_steps <= 2000 / 32 + 2


def test_two_long_prompts_do_not_hold_each_other_up():
    """Fault: each gets half, so that the first is ready as late as the second and nobody gains."""
    scheduler = make_scheduler(num_pages=300, max_context=2000)
    first, second = request_of(640), request_of(640, 1000)
    scheduler.add(first)
    scheduler.add(second)
    assert steps_to_first_token(scheduler, first) == 10
    assert steps_to_first_token(scheduler, second) <= 11


def test_a_long_prompt_with_its_beginning_in_the_cache_counts_as_short():
    """The next turn of an agent has thousands of tokens, nearly all of them known."""
    scheduler = make_scheduler(num_pages=300, max_context=2000)
    turn, long = request_of(500), request_of(300, 1000)
    scheduler.add(turn)
    steps_to_first_token(scheduler, turn)
    scheduler.remove(turn)
    scheduler.add(long)
    step(scheduler)
    next_turn = make_request([*turn.ids, 5, 6, 7])
    scheduler.add(next_turn)
    assert steps_to_first_token(scheduler, next_turn) == 1
    assert not long.num_output


@pytest.mark.parametrize("num_steps_between", [0, 1, 3])
@pytest.mark.parametrize("num_slots", [0, 40])
def test_a_common_beginning_is_computed_once_however_many_bring_it_at_once(num_slots, num_steps_between):
    """M1, fault: agents start together with the same long system prompt, and each computes it beside the others."""
    scheduler = make_scheduler(num_slots=num_slots)
    requests = [make_request([*range(2, 162), *range(500 + 20 * i, 505 + 20 * i)]) for i in range(5)]
    short = request_of(12, 900)
    for request in requests:
        scheduler.add(request)
        for _ in range(num_steps_between):
            step(scheduler)
    scheduler.add(short)
    if not num_steps_between:
        plan = step(scheduler)
        assert shape(plan) == [(requests[0].id, 52, 0), (short.id, 12, 0)], "who has nothing in common goes on"
    while any(not request.num_output for request in [*requests, short]):
        step(scheduler)
    assert [request.num_cached for request in requests] == [0] + [160] * 4


def test_nobody_takes_the_row_that_an_older_one_waits_for():
    """Fault: short prompts overtake a long one again and again, and whenever a row is free, they are there first."""
    scheduler = make_scheduler(num_pages=300, max_context=2000, max_rows=3)
    reading, long = request_of(1000), request_of(1200, 1100)
    shorts = [request_of(10, 3000 + 10 * i) for i in range(3)]
    scheduler.add(reading)
    step(scheduler)
    for request in (long, *shorts):
        scheduler.add(request)
    for _ in range(5):
        step(scheduler)
    assert scheduler.running == [reading, shorts[0]]
    steps_to_first_token(scheduler, reading)
    step(scheduler)
    assert scheduler.running == [reading, long, shorts[0]], "in order of arrival"


def test_what_a_prompt_cannot_use_for_want_of_pages_others_get():
    """Fault: chunks of half the budget as long as somebody waits in vain."""
    scheduler = make_scheduler(num_pages=25, token_budget=64)
    old, other, young = request_of(160), request_of(8, 300), request_of(60, 400)
    for request in (old, other):
        scheduler.add(request)
    step(scheduler)
    pages = scheduler.pool.allocate(scheduler.pool.num_free - 6)
    scheduler.add(young)
    assert shape(step(scheduler)) == [(old.id, 40, 0), (other.id, 1, 0)], "five pages and one"
    assert scheduler.waiting == [young]
    scheduler.pool.release(pages)


def test_requests_are_admitted_in_the_order_of_their_arrival_as_rows_become_free():
    scheduler = make_scheduler(max_rows=2)
    first, second, third, fourth = requests = [request_of(5, first_id=10 * i) for i in range(1, 5)]
    for request in requests:
        scheduler.add(request)
    assert [row.request for row in step(scheduler)] == [first, second]
    assert [row.request for row in step(scheduler)] == [first, second]
    scheduler.remove(first)
    assert [row.request for row in step(scheduler)] == [second, third]
    scheduler.remove(third)
    assert [row.request for row in step(scheduler)] == [second, fourth]


def test_a_short_request_does_not_overtake_a_long_one_that_waits_for_pages():
    """M4: else a request of full length could wait for ever."""
    scheduler = make_scheduler(num_pages=25)
    running, long, short = request_of(80, first_id=1), request_of(180, first_id=100), request_of(3, first_id=90)
    scheduler.token_budget = 200
    scheduler.add(running)
    step(scheduler)
    scheduler.add(long)
    scheduler.add(short)
    assert [row.request for row in step(scheduler)] == [running]
    scheduler.remove(running)
    assert [row.request for row in step(scheduler)] == [long, short]


def test_drafts_share_the_budget_that_the_anchors_leave():
    scheduler = make_scheduler(token_budget=16)
    for i in range(1, 5):
        scheduler.add(request_of(3, first_id=10 * i))
    step(scheduler)
    assert [row.width for row in step(scheduler, width=5)] == [5, 5, 2, 0]


@pytest.mark.parametrize("budget", [8, 9, 16, 40])
def test_drafts_do_not_starve_a_prompt(budget):
    """However many drafts the decoding rows want, a request that has a row or could get one advances in each step."""
    scheduler = make_scheduler(token_budget=budget)
    for i in range(1, 7):
        scheduler.add(request_of(1, first_id=10 * i))
    step(scheduler)
    late = request_of(30, first_id=100)
    scheduler.add(late)
    while not late.num_output:
        plan = step(scheduler, width=15)
        assert next(row.num_known for row in plan if row.request is late) >= 1


def test_drafts_have_the_whole_budget_while_nobody_else_can_use_it():
    """A request that waits because all rows are taken is no reason to draft less."""
    scheduler = make_scheduler(token_budget=18, max_rows=2)
    for i in range(1, 4):
        scheduler.add(request_of(1, first_id=10 * i))
    step(scheduler)
    assert [row.width for row in step(scheduler, width=8)] == [8, 8]


def test_a_width_is_cut_to_what_max_tokens_and_the_context_can_take():
    """B3, B5: the step adds one token of the target's own beside the accepted drafts."""
    scheduler = make_scheduler(max_context=20)
    capped, full, free = request_of(5, 2, max_tokens=5), request_of(17, 30), request_of(2, 60)
    for request in (capped, full, free):
        scheduler.add(request)
    step(scheduler)
    assert [row.width for row in step(scheduler, width=9)] == [3, 1, 9]
    assert [row.width for row in scheduler.schedule(wanting(9))] == [2, 0, 9]


def test_the_youngest_is_preempted_and_returns_first():
    """M4: it gives back all its pages, waits before those who came later, and finds its prefix in the cache."""
    scheduler = make_scheduler(num_pages=8, max_context=64)
    old, young, later = request_of(25, 2), request_of(25, 40), request_of(3, 90)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    scheduler.add(later)
    while young in scheduler.running:
        step(scheduler)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young, later]
    assert (young.pages, young.num_computed, scheduler.num_preemptions) == ([], 0, 1)
    scheduler.remove(old)
    plan = step(scheduler)
    assert [row.request for row in plan] == [young, later]
    assert plan[0].num_known < len(young.ids) - PAGE, "nothing was found in the cache"
    assert young.num_cached == 0, "what a request finds on its return is not what it found at first"


def test_a_prompt_is_counted_once_however_often_it_is_looked_for():
    """Fault: while a request waits for pages, each step would count its hits in the prefix cache again."""
    scheduler = make_scheduler(num_pages=8, max_context=64)
    old, same = request_of(57), request_of(57)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(same)
    for _ in range(3):
        step(scheduler)
    assert list(scheduler.waiting) == [same]
    assert (scheduler.num_queried_tokens, scheduler.num_hit_tokens) == (57, 0)
    scheduler.remove(old)
    step(scheduler)
    assert same.num_cached == 56
    assert (scheduler.num_queried_tokens, scheduler.num_hit_tokens) == (2 * 57, 56)


def test_several_preempted_requests_return_in_their_old_order():
    scheduler = make_scheduler(num_pages=9, max_context=72, token_budget=72)
    requests = [request_of(15, first_id=20 * i) for i in range(1, 5)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    assert scheduler.running == requests
    while len(scheduler.running) > 1:
        step(scheduler)
    assert list(scheduler.waiting) == requests[1:]


def test_drafts_are_given_up_before_anyone_is_preempted():
    """An older row's drafts must not take the page that a younger row's anchor needs."""
    scheduler = make_scheduler(num_pages=3, max_context=24)
    old, young = request_of(7, 2), request_of(7, 40)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)  # both are at their page's last slot now
    step(scheduler)
    assert scheduler.pool.num_free == 1
    young.ids.pop()  # the younger still fits its page with its anchor; the older needs the last page for its own
    young.num_computed -= 1
    assert shape(step(scheduler, width=4)) == [(old.id, 1, 4), (young.id, 1, 0)]
    assert scheduler.num_preemptions == 0

    scheduler = make_scheduler(num_pages=3, max_context=24)
    old, young = request_of(6, 2), request_of(7, 40)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    step(scheduler)  # now the younger needs the last page, and the older wants it for drafts
    assert shape(step(scheduler, width=4)) == [(old.id, 1, 0), (young.id, 1, 4)]
    assert scheduler.num_preemptions == 0


def test_drafts_that_fit_the_own_page_are_kept_when_there_is_no_other():
    scheduler = make_scheduler(num_pages=1, max_context=8)
    request = request_of(3)
    scheduler.add(request)
    step(scheduler)
    assert [row.width for row in step(scheduler, width=15)] == [3]
    scheduler = make_scheduler(num_pages=2, max_context=16)
    old, young = request_of(3), request_of(3, 50)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    assert [row.width for row in step(scheduler, width=9)] == [4, 4]


def test_a_prompt_does_not_preempt_those_who_came_before_it():
    """The one who asks for pages and is itself the youngest goes back to wait."""
    scheduler = make_scheduler(num_pages=10, max_context=80, token_budget=24)
    old, long = request_of(30, 2), request_of(70, 100)
    scheduler.add(old)
    step(scheduler)
    step(scheduler)
    scheduler.add(long)
    while scheduler.num_preemptions == 0:
        plan = step(scheduler)
        assert old in [row.request for row in plan]
    assert scheduler.running[0] is old


def test_the_last_row_alone_is_never_preempted():
    """M4: with the pages of one full request, a request of full length always completes."""
    scheduler = make_scheduler(num_pages=25, max_context=200, max_rows=4)
    requests = [request_of(60, first_id=70 * i) for i in range(1, 5)]
    for request in requests:
        scheduler.add(request)
    done = []
    for _ in range(3000):
        step(scheduler, width=3, num_accepted=1)
        for request in list(scheduler.running):
            if len(request.ids) >= 198:
                done.append(request)
                scheduler.remove(request)
        if len(done) == 4:
            break
    assert done[0] is requests[0]
    assert len(done) == 4
    assert scheduler.num_preemptions > 0
    assert scheduler.pool.num_free == 25


def test_a_removed_request_gives_its_pages_back_wherever_it_is():
    scheduler = make_scheduler(max_rows=1)
    running, waiting = request_of(20), request_of(20, 50)
    scheduler.add(running)
    scheduler.add(waiting)
    step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.pool.num_free == scheduler.pool.num_pages


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_course_of_events_keeps_the_budget_the_pages_and_everyone_moving(data):
    """M4: random arrivals, widths, acceptance and removals; no plan is empty while there is work, and all finish."""
    draw = data.draw
    max_rows = draw(st.integers(1, 5))
    max_context = draw(st.integers(20, 80))
    num_pages = -(-max_context // PAGE) + draw(st.integers(0, 6))
    num_slots = draw(st.sampled_from([0, max_rows, max_rows + 1, max_rows + 5]))
    budget = max_rows + draw(st.integers(0, 30))
    scheduler = make_scheduler(num_pages, max_rows, budget, max_context, num_slots)
    prefixes = [range(2, 90), range(3, 91), range(2, 90, 2)]
    arrivals = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, max_context - 1), st.integers(1, 40)), max_size=9)
    )
    arrivals = [
        make_request([*prefixes[which], *range(90)][:length], StopParams(max_tokens=cap))
        for which, length, cap in arrivals
    ]
    num_unfinished, rng, num_steps = len(arrivals), draw(st.randoms(use_true_random=False)), 0
    while num_unfinished:
        while arrivals and rng.random() < 0.3:
            scheduler.add(arrivals.pop())
        if not (scheduler.running or scheduler.waiting):
            continue
        oldest = min([*scheduler.running, *scheduler.waiting], key=lambda request: request.arrival)
        plan = scheduler.schedule(lambda requests: [rng.randint(0, 15) for _ in requests])
        check(scheduler, plan)
        assert plan and (oldest in [row.request for row in plan] or oldest in scheduler.waiting), "it always advances"
        for requests in (scheduler.running, scheduler.waiting):
            assert requests == sorted(requests, key=lambda request: request.arrival)
        decoding = [r for r in scheduler.running if r.num_uncomputed == 1]
        assert all(r in [row.request for row in plan] for r in decoding), "a decoding row was left out"
        play(scheduler, plan, rng.randint(0, 15))
        for request in list(scheduler.running):
            at_end = len(request.ids) >= min(max_context, request.num_prompt + (request.stops.max_tokens or 0))
            if request.num_output and (at_end or rng.random() < 0.01):
                scheduler.remove(request)
                num_unfinished -= 1
        scheduler.pool.check_integrity()
        num_steps += 1
        assert num_steps < 20_000, "somebody is starved"
    assert scheduler.pool.num_free == num_pages
    assert scheduler.states is None or scheduler.states.num_held == 0
