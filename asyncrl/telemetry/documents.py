"""Files that a reader finds whole or not at all, also if their writer is killed in the middle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document` as JSON (strict: raises ValueError for NaN and infinity), in place of what was there."""
    draft = path.with_name(f".{path.name}.draft")  # one writer a file: what a killed one left is written over
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Half a surrogate pair, which UTF-8 has no bytes for, becomes the escape that JSON has for it.
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)
