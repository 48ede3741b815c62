"""What ended a vLLM worker is known elsewhere by what it logged."""

from __future__ import annotations

import logging
from pathlib import Path

from asyncrl.collectors.engines.vllm_words import LastWords, said


def test_the_first_error_that_is_logged_with_its_exception_is_what_is_said(tmp_path: Path) -> None:
    file = tmp_path / "words"
    assert said(file) == ""
    logger = logging.Logger("vllm")
    logger.addHandler(LastWords(file))
    logger.error("no exception")
    logger.warning("not that bad", exc_info=ValueError("warned"))
    assert said(file) == ""
    for error in (MemoryError("of 2 GiB"), RuntimeError("what came of it")):
        logger.error("WorkerProc hit an exception.", exc_info=error)
    assert said(file) == "MemoryError: of 2 GiB"
