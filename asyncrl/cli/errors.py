"""How a command ends: exit codes, and errors in one to three lines."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable

import click

FAILED = 1
USAGE = 2

BAD_INPUT = (
    ("asyncrl.buffers.base", "BufferError"),
    ("asyncrl.config.errors", "RecipeError"),
    ("asyncrl.data.errors", "DataError"),
    ("asyncrl.learners.cache", "BuiltinModelError"),
    ("asyncrl.learners.model", "ModelError"),
    ("asyncrl.learners.recording", "ReplayError"),
    ("asyncrl.learners.sft_service", "SftError"),
    ("asyncrl.runtime.evaluation", "TargetError"),
    ("asyncrl.runtime.export", "ExportError"),
    ("asyncrl.runtime.folder", "RunFolderError"),
    ("asyncrl.runtime.gate_rules", "GateError"),
    ("asyncrl.runtime.launch", "LaunchError"),
    ("asyncrl.runtime.models", "ModelError"),
    ("asyncrl.runtime.planner", "DoesNotFit"),
    ("asyncrl.runtime.preflight", "RunInUse"),
    ("asyncrl.runtime.profile", "ProfileError"),
    ("asyncrl.runtime.processes", "RunNotFound"),
    ("asyncrl.tasks.base", "TaskError"),
    ("asyncrl.telemetry.profile_sheet", "SheetError"),
)
"""What a person can cause before the work starts. Named, not imported: half of them would load torch. A class whose
module is not loaded cannot have been raised."""


FAILED_WORK = (
    ("asyncrl.benchmarks.runs", "RunError"),
    ("asyncrl.learners.checkpoint", "CheckpointError"),
    ("asyncrl.runtime.export", "ExportFailed"),
    ("asyncrl.runtime.inspection", "Unreadable"),
    ("asyncrl.runtime.processes", "RunFailed"),
)
"""What went wrong after the work had begun."""


def loaded(names: Iterable[tuple[str, str]]) -> tuple[type[BaseException], ...]:
    """The classes of those names whose modules are loaded."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def report(error: BaseException, *, debug: bool) -> int:
    """Say on stderr what went wrong, and return the exit code."""
    if debug and not isinstance(error, click.exceptions.Exit | click.Abort):
        traceback.print_exception(error)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort):
        return 130
    if isinstance(error, click.ClickException):
        hint = f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
        _say(f"{error.format_message()}{hint}")
        return error.exit_code
    if isinstance(error, loaded(FAILED_WORK)):
        _say(str(error))
        return FAILED
    if isinstance(error, Failure):
        _say(str(error))
        return error.code
    if isinstance(error, loaded(BAD_INPUT)):
        _say(str(error))
        return USAGE
    if isinstance(error, OSError) and error.filename is not None:  # a path somebody gave
        _say(f"{error.filename}: {error.strerror}")
        return USAGE
    _say(f"{type(error).__name__}: {error}")
    if not debug:
        click.echo("This is a fault of asyncrl or of code it ran; `asyncrl --debug ...` shows where.", err=True)
    return FAILED


class Failure(Exception):
    """The command did what it should and found that something has failed; the message is for a person."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def _say(message: str) -> None:
    click.echo(f"Error: {message}", err=True)
