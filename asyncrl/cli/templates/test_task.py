"""The reward says what you mean, tried without a model: `python -m unittest`, or `python -m pytest`."""

import unittest

from task import MyTask

from asyncrl.tasks.base import Answer, Row

ROW = Row(id="1", prompt="reverse 4821", answer="1284")


def reward(text, finish_reason="stop"):
    return MyTask().score(ROW, Answer(text=text, token_ids=(), finish_reason=finish_reason))


class TestMyTask(unittest.TestCase):
    def test_only_the_right_answer_is_worth_something(self):
        assert reward("1284") == 1.0
        assert reward("4821") == reward("") == 0.0

    def test_an_answer_that_was_cut_off_is_worth_nothing(self):
        assert reward("1284", finish_reason="length") == 0.0

    def test_no_heldout_prompt_is_trained(self):
        train, heldout = ({row.prompt for row in MyTask().rows(split)} for split in ("train", "heldout"))
        assert train
        assert heldout
        assert not train & heldout


if __name__ == "__main__":
    unittest.main()
