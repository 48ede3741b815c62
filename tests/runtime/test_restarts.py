from hypothesis import given
from hypothesis import strategies as st

from asyncrl.runtime.restarts import LIMIT, LONGEST_DELAY_S, WINDOW_S, Restarts


def test_delays_double_up_to_the_longest_and_then_the_run_gives_up():
    restarts = Restarts()
    delays = [restarts.died(now=float(n), progress=3) for n in range(LIMIT + 1)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_a_step_in_between_clears_the_count():
    restarts = Restarts()
    for step in range(50):
        assert restarts.died(now=float(step), progress=step) == 1.0


def test_deaths_that_are_long_ago_do_not_count():
    restarts = Restarts()
    for n in range(50):
        assert restarts.died(now=n * (WINDOW_S / (LIMIT - 1)) * 1.01, progress=0) is not None


def test_the_next_start_is_due_once_for_each_death():
    restarts = Restarts()
    assert not restarts.waiting
    assert not restarts.due(now=10.0)
    restarts.died(now=10.0, progress=0)
    assert restarts.waiting
    assert [restarts.due(now=now) for now in (10.9, 11.0, 11.1)] == [False, True, False]
    assert not restarts.waiting


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 3)), max_size=60))
def test_never_more_restarts_in_a_window_than_the_limit_unless_the_run_moved_on(events):
    restarts = Restarts()
    now, step, granted = 0.0, 0, []
    for gap, steps in events:
        now, step = now + gap, step + steps
        if steps:
            granted.clear()
        delay = restarts.died(now=now, progress=step)
        granted = [at for at in granted if now - at <= WINDOW_S]
        if delay is None:
            assert len(granted) == LIMIT
            break
        assert 0 < delay <= LONGEST_DELAY_S
        granted.append(now)
        assert len(granted) <= LIMIT
