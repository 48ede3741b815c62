r"""One way to write a mathematical answer: what differs in type only is made equal. Pure, and nothing is computed.

White space, math delimiters, typographic signs, thousands separators, units behind a number, bold, and the ways to
write a mixed number, a repeating decimal, an interval or a set. A dot is a decimal point; a comma between groups of
three digits separates thousands, unless brackets stand around it, where commas separate elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

SIGNS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–—﹣－", "-"),  # minus, hyphens and dashes
        **{chr(sign): " " for sign in (0xA0, *range(0x2000, 0x200B), 0x202F, 0x3000)},
        **dict.fromkeys("\u200b\u2060\ufeff", ""),  # of no width
        **dict.fromkeys("‘’′", "'"),
        **dict.fromkeys("“”″", '"'),
        **{chr(0xFF01 + n): chr(0x21 + n) for n in range(94) if chr(0x21 + n) != "-"},  # full width: １ ＋ （
        **{
            sign: rf"\frac{{{top}}}{{{bottom}}}"
            for sign, top, bottom in zip("½⅓⅔¼¾⅕⅛", "1121311", "2334458", strict=True)
        },
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "∕": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "…": r"\ldots ",
        "°": r"^\circ",
        "€": "",
        "£": "",
        "¥": "",
        "₹": "",
    }
)

RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

NUMBER = r"-?\d+(?:\.\d+)?"
PERCENT = (
    r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|pct|per cent)\.?\s*\}"
    r"|(?<=[\d ])(?:percent(?:age)?|pct|per cent)\b)"
)
DEGREE = r"(?:\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degree(?![a-zA-Z]))"
TENS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NOT_UNITS = (  # 18 (or 20) and 18 plus one are not 18
    rf"\b(?:hundred|dozen|{'|'.join(TENS)}|pi|sqrt|sin|cos|tan|log|ln|exp|mod|am|pm|or|and|if|is|not|to|than|maybe|perhaps"
    r"|possibly|plus|minus|times|squared|cubed|twice|double|half|wrong)\b"
)
UNIT = (
    rf"\\(?:text|mathrm|textrm|mbox|operatorname)\s*\{{(?![^{{}}]*{NOT_UNITS})"
    r"(?:[^{}\d]|\^[23]|(?<=m)[23])*\}(?:\s*\^\s*\{?[23]\}?)?"
)
BARE_UNIT = (
    rf"^({NUMBER}(?:,\d{{3}})*(?:\.\d+)?|.*\\frac\{{\d+\}}\{{\d+\}})(?!.*{NOT_UNITS})(?:\s+"
    r"(?:[a-zA-Z]{3,}|[mck]m|[mk]g|m[lLi]|ft|in|yd|lb|oz|hr)\b[a-zA-Z ./]*"  # 3 ab is a product
    r"|(?:[mck]m|[mk]g|m[lL]|ft|mph|lbs?|hrs?|mins?))(?:\^\{?[23]\}?)?$"  # 3cm is not
)
FULL_TEXT = r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox)\s*"
INTERVAL = r"^([\[\](])([^\[\]()]*,[^\[\]()]*)([\[\])])$"
OPENING, CLOSING = {"]": "("}, {"[": ")"}  # of ]1, 2[


def _exactly(found: re.Match[str]) -> str:
    """A decimal whose last digits repeat, as a fraction."""
    whole, again = found[1], found[2] or found[3]
    places = len(whole.partition(".")[2])
    value = Fraction(whole + "0") + Fraction(int(again), (10 ** len(again) - 1) * 10**places)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


By = str | Callable[[re.Match[str]], str]
REPLACED: list[tuple[re.Pattern[str], By]] = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"^\*\*(.*)\*\*$", r"\1"),  # bold of Markdown; elsewhere it is a power
        (r"\\(?:textbf|mathbf|boldsymbol|bm)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:displaystyle|limits|left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\\\\[[\d.]+\s*[a-z]{2}\]", r"\\\\ "),  # a line of a matrix, and how far the next one is
        (r"(?<!\\)\\!|\{\}", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\hspace\{[^{}]*\}|\s+", " "),
        (r"\\+\s*$", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[$()]|\$|^\s*\\\[|\\\]\s*$", ""),
        (r"\\var(epsilon|theta|phi|rho|sigma)(?![a-zA-Z])", r"\\\1"),
        (r"\\varnothing(?![a-zA-Z])|^\\\{\s*\\\}$", r"\\emptyset "),
        (r"\\colon(?![a-zA-Z])", ":"),
        (r"^(?:\\approx|\\simeq|\\sim)(?![a-zA-Z])", ""),
        (rf"^{FULL_TEXT}\{{(?![^{{}}]*\bnot\b)[^{{}}\d]*(?:[:=]|\bis|\bare)\s*\}}", ""),
        (r"^(?:The |the )?(?:final |Final )?[Aa]nswer(?: is)?\b\s*:?", ""),
        (rf"^{FULL_TEXT}\{{\s*(-?\d[^{{}}]*)\}}$", r"\1"),
        (rf"{FULL_TEXT}\{{\s*([-+]?[\d.,:/ ]*\d)\s*\}}", r"\1"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<=\d)\s*(?:\\text\s*\{\s*)?([AaPp])\.?[Mm]\b\.?\s*\}?\s*$", lambda found: f" {found[1].lower()}m"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d+)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"√\s*(\d+(?:\.\d+)?|\w|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d{2,})", r"\\sqrt{\1}"),
        (r"(\\sqrt\s*\[[^\[\]]*\])\s*(\w)", r"\1{\2}"),
        (r"\\log_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})", r"\\ln "),
        (r"(\d*\.\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\s*\d)", _exactly),
        (r"(\d\.\d+)\s*(?:\\l?dots(?![a-zA-Z])|\.\.\.)$", r"\1"),
        (r"\\(?:dots[cbm]?|cdots)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (
            r"^\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\(?:mid|vert)(?![a-zA-Z])|[|:])"
            r"(?=.*(?:[<>=]|\\(?:[lg](?:e|t)|ne)q?))(.*)\\\}$",
            r"\1",
        ),
        (
            INTERVAL,
            lambda found: f"{OPENING.get(found[1], found[1])}{found[2]}{CLOSING.get(found[3], found[3])}",
        ),
        (r",\s*\(?[a-z]\s*\\in\s*\\mathbb\s*\{?\s*Z\s*\}?\)?$", ""),
        (PERCENT, "%"),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])(?:\^\{?\d+\}?)?\s*[({]?\s*)"
            rf"(\d+(?:\.\d+)?)\s*{DEGREE}",
            r"\1\\frac{\2\\pi}{180}",
        ),
        (rf"{DEGREE}|(?<=\d) degrees?\b", ""),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"\*\*", "^"),
        (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (
            rf"^({NUMBER})\s*(?:\\text\s*\{{\s*)?({'|'.join(TENS)})\b[a-zA-Z ]*\}}?$",
            lambda found: rf"{found[1]}\times10^{{{TENS[found[2]]}}}",
        ),
        (rf"(?<=[\d}})\]a-zA-Z!])\s*(?:\\frac\s*\{{\s*{UNIT}\s*\}}\s*\{{\s*{UNIT}\s*\}}|/?\s*{UNIT})\s*\.?$", ""),
        (rf"(?<=[\d}})\]a-zA-Z!])\s*{UNIT}\s*$", ""),  # of m/s, the m
        (r"(?<![\d.\w}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
        (BARE_UNIT, r"\1"),
        (r"^(-?\d{1,3})((?: \d{3})+)(?=\.\d|$)", lambda found: found[1] + found[2].replace(" ", "")),
    )
]
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)")
OPENS = re.compile(r"\\?[(\[{]")
TEXT = re.compile(rf"{FULL_TEXT}\{{([^{{}}]*)\}}")
MEANINGLESS = re.compile(r"(?<![0-9]) +| +(?![0-9])")


def plain(text: str) -> str:
    r"""The answer in one way of writing, for comparing and for the computer algebra.

    >>> [plain(text) for text in ("$1,000$", "−2 2/3", "28 percent", r"5\,\text{cm}^2", "(1,000)")]
    ['1000', '-2\\frac{2}{3}', '28%', '5', '(1,000)']
    """
    text = RAISED.sub(lambda found: f"^{{{found[0].translate(LOWERED)}}}", text)
    text = text.translate(SIGNS).strip().strip('"')
    for pattern, by in REPLACED:
        text = pattern.sub(by, text).strip()
    text = text.lstrip("= ").rstrip(" .,;:")
    return text if OPENS.match(text) else GROUPED.sub(lambda found: found[0].replace(",", ""), text)


def squeezed(text: str) -> str:
    """Without white space, where that changes nothing: `1 2` is not 12.

    >>> squeezed("x + 1"), squeezed("1 2")
    ('x+1', '1 2')
    """
    return MEANINGLESS.sub("", text)


def folded(text: str) -> str:
    r"""What an answer says where it is words. Neither case nor white space nor brackets around it count.

    >>> folded(r"\text{ (Monday) }")
    'monday'
    """
    return " ".join(TEXT.sub(r"\1", text).split()).strip("() ").casefold()
