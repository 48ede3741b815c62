"""Which engine takes a request: balance, slots first, groups together, nobody left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.routing import Ask, Load, spread

LOADS = st.lists(
    st.builds(Load, free=st.integers(-3, 9), tokens=st.integers(0, 500), groups=st.just(frozenset()).map(set)),
    min_size=1,
    max_size=6,
)
GROUPS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 50), st.integers(1, 100)), max_size=40)


def group(name: str, members: int, prompt: int, most: int) -> list[Ask]:
    return [Ask(name, prompt, most)] * members


def copies(loads: list[Load]) -> list[Load]:
    return [Load(load.free, load.tokens, set(load.groups)) for load in loads]


@given(LOADS, GROUPS)
def test_no_request_waits_beside_a_free_slot(loads: list[Load], groups: list[tuple[int, int, int]]) -> None:
    for n, (members, prompt, most) in enumerate(groups):
        free = sum(max(0, load.free) for load in loads)
        before = copies(loads)
        chosen = spread(loads, group(str(n), members, prompt, most))
        started = sum(min(max(0, load.free), chosen.count(at)) for at, load in enumerate(before))
        assert started == min(free, members)


@given(LOADS, st.integers(1, 50), st.integers(1, 100))
def test_one_request_goes_to_the_fewest_outstanding_tokens_of_those_with_a_free_slot(
    loads: list[Load], prompt: int, most: int
) -> None:
    before = copies(loads)
    (n,) = spread(loads, group("g", 1, prompt, most))
    able = [load.tokens for load in before if load.free > 0] or [load.tokens for load in before]
    assert before[n].tokens == min(able)
    assert loads[n].tokens == before[n].tokens + prompt + most
    assert loads[n].free == before[n].free - 1


@given(LOADS, st.integers(1, 8), st.integers(1, 50), st.integers(1, 100))
def test_a_group_is_computed_at_as_few_engines_as_have_slots_for_it(
    loads: list[Load], members: int, prompt: int, most: int
) -> None:
    free = sorted((max(0, load.free) for load in loads), reverse=True)
    fewest, room = 0, 0
    while room < members and fewest < len(free) and free[fewest]:
        room, fewest = room + free[fewest], fewest + 1
    before = copies(loads)
    chosen = spread(loads, group("g", members, prompt, most))
    began = {n for n in chosen if before[n].free > 0}
    assert len(began) == fewest
    added = sum(load.tokens for load in loads) - sum(load.tokens for load in before)
    assert added == members * most + len(set(chosen)) * prompt, "each engine computes the prompt once"


@given(st.integers(2, 6), GROUPS)
def test_without_free_slots_engines_stay_within_one_request_of_each_other(
    engines: int, groups: list[tuple[int, int, int]]
) -> None:
    """The greedy bound: nobody is further behind than the largest thing that was ever placed."""
    loads, largest = [Load(0, 0) for _ in range(engines)], 0
    for n, (members, prompt, most) in enumerate(groups):
        spread(loads, group(str(n), members, prompt, most))
        largest = max(largest, prompt + most)
        tokens = [load.tokens for load in loads]
        assert max(tokens) - min(tokens) <= largest


def test_no_engine_starves_while_work_comes() -> None:
    loads = [Load(4, 0) for _ in range(5)]
    used = {n for at in range(5) for n in spread(loads, group(str(at), 4, 10, 10))}
    assert used == set(range(5))


def test_a_member_that_comes_alone_is_drawn_to_where_its_group_is_unless_that_costs_more_than_its_prompt() -> None:
    for ahead, expected in ((20, 1), (40, 0)):
        loads = [Load(4, 100), Load(4, 100 + ahead, {"g"})]
        assert spread(loads, group("g", 1, 30, 50)) == [expected]
