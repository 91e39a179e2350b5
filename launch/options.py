"""Code that all verbs share: the parser of a command line, the error for a missing job, and the exit code."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Union

from common.arguments import declared, typed
from common.errors import TrainingFailed, UserError, file_error, one_line
from common.secrets import HIDDEN, is_secret


class VerbParser(argparse.ArgumentParser):
    """Reads options in all spellings that a job allows;
    its errors mask the value of an option whose name means a secret."""

    def parse_known_args(self, args: Any = None, namespace: object = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(typed.normalize(self, words, from_a_console=False), namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message, with the values of secret options masked, and exit with 2."""
        takes_a_job = any(action.dest == "job" for action in declared.actions(self))
        if takes_a_job and message.startswith("unrecognized arguments"):
            message += "; the job's own options come after --"
        super().error(re.sub(r"(--[A-Za-z][\w-]*)[= ](\S+)", _masked, one_line(message)))


def _masked(match: re.Match[str]) -> str:
    return f"{match[1]} {HIDDEN}" if is_secret(match[1]) else match[0]


def new_parser(verb: str, description: Optional[str], allow_abbrev: bool = True) -> VerbParser:
    """Return a parser whose help keeps the line breaks of the description."""
    return VerbParser(
        prog=f"python -m launch {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return (the verb's own words, the job's words), which the first -- separates."""
    index = argv.index("--") if "--" in argv else len(argv)
    return argv[:index], argv[index + 1 :]


def missing_job(path: Union[str, Path], folder: Union[str, Path] = "") -> Optional[str]:
    """Return an error text if `path` is no file, else None. A relative path is one below `folder`."""
    if os.path.isfile(os.path.join(folder, path)):
        return None
    return f"there is no job {one_line(path)}: give a job's file, such as jobs/train_ddp.py"


def run_for_exit_code(work: Callable[[], Optional[int]], default_path: Optional[str] = None) -> int:
    """Call `work` and return an exit code; an expected error is printed as one line.

    An OSError that names no file is said to be about `default_path`.
    """
    try:
        return work() or 0
    except (UserError, TrainingFailed) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        words = (error.filename or default_path, error.strerror or error)
        print(f"error: {': '.join(one_line(word) for word in words if word)}", file=sys.stderr, flush=True)
        return file_error(error, "").exit_code
    except KeyboardInterrupt:
        return 130
