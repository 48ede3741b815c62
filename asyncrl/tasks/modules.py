"""Modules of other people's, and what is said of them when they fail."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Literal

from asyncrl.tasks.base import TaskError

HERE = Path(__file__).parent

PLURALS = {"class": "classes", "function": "functions"}


def search_working_folder() -> str:
    """Have the working folder searched for modules, last, so that a file in it hides no installed one. Returns it."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)
    return folder


def load(key: str, name: str, kind: Literal["class", "function"]) -> Any:
    """The class or function "module:name" that the recipe's `key` names. The working folder is searched last, so that a
    file in it hides no installed module. Raises TaskError."""
    module_name, _, wanted = name.partition(":")
    if module_name == "__main__":
        raise TaskError(
            f"{key} {name}: other processes load it too, and have another __main__; write it into a file, as in "
            f"{key}: my_{key.rpartition('.')[2]}:{wanted} for my_{key.rpartition('.')[2]}.py (in a notebook, begin the "
            f"cell with %%writefile my_{key.rpartition('.')[2]}.py)"
        )
    folder = search_working_folder()
    _refuse_shadowed(key, name, module_name.partition(".")[0], Path(folder))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise TaskError(
                f"{key} {name}: there is no module {missing} in {folder}, nor an installed one.\n"
                f"Start from the folder that holds {missing.replace('.', '/')}.py, or add its folder to PYTHONPATH."
            ) from error
        raise TaskError(f"{key} {name}: importing {module_name} raised {complaint(error)}") from error
    found = getattr(module, wanted, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        own = [key for key in known if inspect.isclass(getattr(module, key)) == (kind == "class")]
        close = difflib.get_close_matches(wanted, own, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"its {PLURALS[kind]} are: {', '.join(own) or 'none'}"
        raise TaskError(f"{key} {name}: {module.__file__} has no {kind} {wanted}; {hint}")
    return found


def complaint(error: BaseException) -> str:
    """The exception in one line, and where in the module it was raised."""
    if isinstance(error, SyntaxError):  # not raised in the file, but about it
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _refuse_shadowed(key: str, name: str, module: str, folder: Path) -> None:
    """Raise TaskError if the working folder has such a module and an installed one, found earlier, hides it."""
    here = next((path for path in (folder / f"{module}.py", folder / module / "__init__.py") if path.is_file()), None)
    spec = None if here is None else importlib.util.find_spec(module)
    if here is None or spec is None:
        return
    if not spec.has_location or spec.origin is None:
        found = "a module built into Python"
    elif Path(spec.origin).resolve() == here.resolve():
        return
    else:
        found = spec.origin
    raise TaskError(
        f"{key} {name}: {module} is {found}, which hides {here}.\n"
        f"Rename yours and {key}, as in my_{module}. (The working folder is searched last, so that no file in it "
        "hides a library.)"
    )
