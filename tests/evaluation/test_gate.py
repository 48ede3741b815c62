"""Rules against numbers: what they mean, what they cannot tell, and what is no rule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.collectors.evaluation.compared import comparison
from asyncrl.collectors.evaluation.report import report
from asyncrl.runtime.gate import default_rules, gated, judge
from asyncrl.runtime.gate_rules import GateError, Rule, check_rules, read_rules

PROMPTS = 40


def answers(*right: int, wrong: str = "wrong_answer", task: str = "", tokens: int = 10, prompts: int = PROMPTS) -> Any:
    """One answer to each prompt; those in `right` are."""
    return [
        {
            **{"task": task, "row_id": str(n), "failure": "", "finish_reason": "stop", "tokens": tokens},
            "reward": float(n in right),
            "parts": {"exact": float(n in right)},
            "wrong": "" if n in right else wrong,
        }
        for n in range(prompts)
    ]


def document(ours: Any, theirs: Any = None) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"ks": [1], "pass_above": 0.0, "seed": 0}
    found = {"answers": ours, "report": report(ours, samples=1, **settings)}
    if theirs is None:
        return found
    against = {"answers": theirs, "report": report(theirs, samples=1, **settings)}
    return {**found, "against": against, "difference": comparison(ours, theirs, **settings)}


def verdicts(rules: str, found: Mapping[str, Any]) -> list[str]:
    return [one.verdict for one in judge(read_rules(rules), found)]


WORSE, BETTER = answers(*range(10)), answers(*range(25))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pass@1 >= 0.4", Rule("pass@1 >= 0.4", "pass@1", ">=", bound=0.4)),
        ("malformed<=2%", Rule("malformed<=2%", "wrong/malformed", "<=", bound=0.02)),
        ("wrong/malformed < 1e-2", Rule("wrong/malformed < 1e-2", "wrong/malformed", "<", bound=0.01)),
        ("reward/exact in maths > -1", Rule("reward/exact in maths > -1", "reward/exact", ">", "maths", -1.0)),
        ("reward  better", Rule("reward better", "reward", "better")),
        ("unsafe not worse", Rule("unsafe not worse", "wrong/unsafe", "not worse")),
        (
            "tokens_per_success not worse by 10%",
            Rule("tokens_per_success not worse by 10%", "tokens_per_success", "not worse by", "", 0.1, True),
        ),
        ("pass@4 not worse by .02", Rule("pass@4 not worse by .02", "pass@4", "not worse by", "", 0.02, False)),
    ],
)
def test_a_rule_is_read_as_it_is_meant(text: str, rule: Rule) -> None:
    assert read_rules(text) == [rule]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--gate is empty"),
        ("pass@1", "is no rule"),
        ("pass@1 >= ", "is no rule"),
        ("pass@1 >= four", "is no rule"),
        ("pass@1 not better", "is no rule"),
        ("pass@1 >= 0.4 and more", "is no rule"),
        ("pass@0 >= 0.4", "did you mean 'pass@1'?"),
        ("truncatd <= 1%", "did you mean 'truncated'?"),
        ("Malformed <= 1%", "neither a metric"),
        ("reward not worse by -1", "not below 0"),
        ("pass@1 >= 40", "pass@1 lies between 0 and 1: write 40%"),
        ("malformed <= 2", "malformed lies between 0 and 1: write 2%"),
        ("majority@8 not worse by 5", "majority@8 lies between 0 and 1: write 5%"),
        ("truncated < -0.1", "between 0 and 1"),
        ("gone.yaml", "'gone.yaml' cannot be read: No such file"),
        ("pass@1 >= 40%; reward better.yml", "cannot be read"),
    ],
)
def test_what_is_no_rule_is_said_with_the_rule(text: str, said: str) -> None:
    with pytest.raises(GateError) as raised:
        read_rules(text)
    assert said in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_is_rules_or_one_clear_error(text: str) -> None:
    with suppress(GateError):
        assert read_rules(f"; {text}")


def test_rules_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text("# before it goes on\n- default\n- pass@1 >= 40%\n")
    assert [rule if isinstance(rule, str) else rule.metric for rule in read_rules(str(file))] == ["default", "pass@1"]
    for text, said in (("rules: 1\n", "a YAML list"), ("- a\n- {b\n", "line"), ("- 1\n", "a YAML list")):
        file.write_text(text)
        with pytest.raises(GateError, match=said):
            read_rules(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pass@1 better", "--against TARGET"),
        ("default", "--against TARGET"),
        ("pass@8 >= 0.5", "--k 8"),
        ("majority@8 >= 0.5", "--n 8"),
    ],
)
def test_what_an_evaluation_will_not_have_is_said_before_it_begins(text: str, said: str) -> None:
    with pytest.raises(GateError) as raised:
        check_rules(read_rules(text), ks=[1, 4], samples=4, compared=False)
    assert said in str(raised.value)
    check_rules(read_rules("pass@4 >= 0; majority@4 >= 0; malformed <= 0"), ks=[1, 4], samples=4, compared=False)


def test_thresholds_are_compared_with_the_number_itself() -> None:
    found = document(BETTER)  # 25 of 40
    assert verdicts("pass@1 >= 62.5%; pass@1 > 62.5%; wrong_answer <= 0.375; wrong_answer < 0.375", found) == [
        *("holds", "fails", "holds", "fails")
    ]
    assert verdicts("tokens_per_success <= 16; truncated <= 0; unscored < 0", found) == ["holds", "holds", "fails"]


def test_better_and_not_worse_are_beyond_chance() -> None:
    rules = "reward better; reward not worse; wrong_answer not worse; reward not worse by 10%"
    assert verdicts(rules, document(BETTER, WORSE)) == ["holds"] * 4
    assert verdicts(rules, document(WORSE, BETTER)) == ["fails"] * 4
    close = answers(*range(11))  # one more than WORSE: nobody can tell
    assert verdicts(rules, document(close, WORSE)) == ["cannot tell", "holds", "holds", "cannot tell"]
    assert verdicts("reward not worse by 10%; reward not worse by .1", document(close, WORSE)) == [
        "cannot tell",
        "holds",
    ]
    mixed = answers(*range(3, 13))  # three better, three worse
    assert verdicts(rules, document(mixed, WORSE)) == ["cannot tell", "holds", "holds", "cannot tell"]


def test_with_too_few_prompts_no_comparison_holds() -> None:
    few = document(answers(0, 1, 2, 3, 4, prompts=5), answers(prompts=5))
    assert verdicts("reward better; reward not worse; reward not worse by 50%", few) == ["cannot tell"] * 3
    assert verdicts("reward >= 1", few) == ["holds"]
    assert not gated(read_rules("reward better"), few)["holds"]


def test_without_the_test_for_chance_a_lucky_few_would_pass() -> None:
    """Negative control: all of five prompts are better, and the bootstrap alone is sure of it."""
    found = document(answers(*range(5), prompts=5), answers(prompts=5))["difference"]["metrics"]["reward"]
    assert found["low"] > 0
    assert found["p"] > 0.05


def test_few_prompts_that_did_not_change_rule_out_no_loss() -> None:
    """None of eight changed; of forty that would say a little, and of three hundred enough."""
    rules = "reward not worse by .05; reward not worse; unsafe not worse by .05; unsafe <= 0"
    for prompts, verdict in ((8, "cannot tell"), (40, "cannot tell"), (300, "holds")):
        same = answers(*range(prompts), prompts=prompts)
        assert verdicts(rules, document(same, same)) == [verdict, "holds", verdict, "holds"]
    (share,) = judge(read_rules("unsafe not worse by 5%"), document(same, same))
    assert (share.verdict, "write `not worse by 0.01`" in share.said) == ("cannot tell", True)


def test_a_price_may_grow_by_so_much_and_no_more() -> None:
    found = document(answers(*range(20), tokens=103), answers(*range(20), tokens=100))
    rules = "tokens_per_success not worse by 10%; tokens_per_success not worse by 1%"
    assert verdicts(rules, found) == ["holds", "fails"]
    assert verdicts("tokens_per_success not worse by 10%", document(answers(0), answers())) == ["cannot tell"]


def test_the_default_gate_wants_better_on_the_whole_and_nothing_worse() -> None:
    assert gated(read_rules("default"), document(BETTER, WORSE))["holds"]
    unsafe = answers(*range(25), wrong="unsafe")
    broken = gated(read_rules("default"), document(unsafe, WORSE))
    assert [one["rule"] for one in broken["rules"] if one["verdict"] != "holds"] == ["unsafe not worse"]
    same = gated(read_rules("default"), document(WORSE, WORSE))
    assert [one["rule"] for one in same["rules"] if one["verdict"] != "holds"] == ["reward better"]


def test_the_default_gate_looks_at_each_task_and_a_rule_may_name_one() -> None:
    ours = answers(*range(40), task="maths") + answers(*range(5), task="code")
    theirs = answers(*range(10), task="maths") + answers(*range(20), task="code")
    found = document(ours, theirs)
    rules = {rule.text: verdict for rule, verdict in zip(default_rules(found), verdicts("default", found), strict=True)}
    assert (rules["reward better"], rules["reward in maths not worse"]) == ("holds", "holds")
    assert rules["reward in code not worse"] == "fails"
    assert verdicts("pass@1 in maths >= 1; pass@1 in code >= 0.2; reward in code better", found) == [
        *("holds", "fails", "fails")
    ]
    alone = document(answers(0, task="maths"))
    assert verdicts("pass@1 in maths >= 1%", alone) == ["holds"], "the only task there is"


def test_a_part_or_task_that_is_not_there_is_an_error_and_a_class_is_none() -> None:
    found = document(BETTER, WORSE)
    for rule, said in (("reward/exct >= 1", "reward/exact"), ("reward in maths >= 1", "no held-out prompt")):
        with pytest.raises(GateError, match=said):
            judge(read_rules(rule), found)
    (judged,) = judge(read_rules("unsafe <= 0"), found)
    assert (judged.verdict, "no answer is of this class" in judged.said) == ("holds", True)


def test_nothing_scored_holds_nothing() -> None:
    lost = [{**answer, "reward": None, "failure": "verifier_nan", "wrong": ""} for answer in WORSE]
    rules = "reward >= 0; unsafe <= 0; reward better; unsafe not worse"
    assert verdicts(rules, document(lost, WORSE)) == ["cannot tell"] * 4
