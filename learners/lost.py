"""The one error of a learner that says nothing about the run: a process of its own is gone. Another learner goes on."""

from __future__ import annotations


class RankLost(Exception):
    """A rank ended, or does not answer; names it, and how.

    Whoever raises it leaves the run in the store as it is: collectors wait for the learner that is started next, as
    they do after one that was killed.
    """
