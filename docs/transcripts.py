"""What commands print, for `docs/errors.md`: every ```console block is run again, line by line, in one folder a page.

`$ asyncrl ...` runs, and what it prints replaces the lines that follow; `$ cat FILE` makes FILE from them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

from asyncrl.cli.main import main

BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
SHOWN = "/home/you/mine"
"""What stands for the folder in which the commands run."""


def run_again(page: str, folder: Path) -> str:
    """The page with what its commands print now. `folder`: empty."""
    return BLOCK.sub(lambda match: _block(match[0], folder), page)


def _block(block: str, folder: Path) -> str:
    shown = []
    for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = entry.partition("\n")
        words = shlex.split(command)
        if words[0] == "cat":
            path = folder / words[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(output, encoding="utf-8")
        else:
            output = _printed(words, folder).replace(str(folder), SHOWN)
        shown.append(f"$ {command}\n{output}")
    return "".join(shown)


def _printed(words: list[str], folder: Path) -> str:
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(sys, "argv", words),
        contextlib.suppress(SystemExit),
    ):
        main()
    return printed.getvalue()
