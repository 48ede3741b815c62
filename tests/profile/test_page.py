"""The page of a profile: one file, whatever the model wrote."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from asyncrl.telemetry.profile_page import LONGEST, class_of, page

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "<!-- ",
    "]]></style><style>body{display:none}",
    "\x00\x1b[31m\u202e\ud800",
    "&lt;b&gt;",
]

VOID = {"meta", "br", "img"}


class Read(HTMLParser):
    """Which elements there are, what they carry, whether all are closed, and all the text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_it_is_whole_and_says_the_verdict_and_every_answer(entry, document):
    answers = [entry("a", 1.0), entry("a", 0.0, answer="5", wrong="wrong_answer"), entry("b", None, parts={})]
    read = Read(page(document(answers)))
    assert read.open == []
    assert read.tags.count("tr") == 1 + 3
    assert "verifier first: " in read.text
    assert "33% of the answers have no score (verifier_raised 1)" in read.text
    kinds = [value for tag, name, value in read.attributes if (tag, name) == ("tr", "data-class")]
    assert kinds == ["passed", "wrong_answer", "verifier_raised"]
    assert [value for tag, name, value in read.attributes if (tag, name) == ("option", "value")] == ["", *sorted(kinds)]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_is_only_text(entry, document, text):
    harmless, hostile = (
        Read(
            page(
                document(
                    [
                        entry(
                            said,
                            0.0,
                            prompt=said,
                            answer=said,
                            expected=said,
                            wrong=said,
                            detail=said,
                            parts={said: 0.0},
                        )
                    ]
                )
            )
        )
        for said in ("plain", text)
    )
    assert hostile.tags == harmless.tags
    assert [(tag, name) for tag, name, _ in hostile.attributes] == [(tag, name) for tag, name, _ in harmless.attributes]
    assert hostile.open == []
    assert all(char.isprintable() or char == "\n" for char in hostile.text)
    assert text.isprintable() is (text in hostile.text)


def test_a_narrow_screen_and_a_dark_one_are_thought_of(entry, document):
    text = page(document([entry()]))
    read = Read(text)
    assert ("meta", "content", "width=device-width, initial-scale=1") in read.attributes
    assert ("svg", "viewbox", "0 0 484 160") in read.attributes, "so that it may shrink"
    assert '<div class="wide"><table>' in text, "so that it alone is scrolled"
    assert "prefers-color-scheme: dark" in text


def test_it_loads_nothing_and_sends_nothing(entry, document):
    read = Read(page(document([entry(answer="http://example.com/x.png")])))
    assert not {name for _, name, _ in read.attributes} & {"src", "href", "action", "srcset", "data", "onclick"}
    _, policy = (value for tag, name, value in read.attributes if (tag, name) == ("meta", "content"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_no_script_runs_but_its_own(entry, document):
    """The policy names the one script and the one style sheet by their hashes, as a browser computes them."""
    text = page(document([entry()]))
    for tag in ("script", "style"):
        (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{hashed}'" in text
    assert "unsafe" not in text


def test_an_answer_of_200_kb_does_not_make_a_page_of_it(entry, document):
    text = page(document([entry(answer="<" * 200_000, prompt="\x00" * 200_000)]))
    assert len(text) < 3 * 4 * LONGEST + 20_000
    assert "180000 more characters" in Read(text).text


def test_it_can_be_written_whatever_it_holds(entry, document, tmp_path):
    (tmp_path / "page.html").write_text(page(document([entry(answer="\ud800", row_id="\udcff")])), encoding="utf-8")


def test_the_class_of_an_answer_is_why_it_has_no_score_or_what_is_wrong_with_it(entry):
    answers = [entry(), entry(reward=0.0), entry(reward=0.0, wrong="malformed"), entry(reward=None)]
    assert [class_of(answer, 0.0) for answer in answers] == ["passed", "failed", "malformed", "verifier_raised"]
