"""Code that all verbs share: the parser of a command line, the error for a missing job, and the exit code."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Union

from common import typed
from common.errors import TrainingFailed, UserError, of_a_file, one_line
from common.secrets import HIDDEN, is_secret


class Parser(argparse.ArgumentParser):
    """Reads words as a job does (common/typed.py); its errors quote no secret, such as the value of an unknown option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(typed.as_meant(self, words, from_a_console=False), namespace)

    def error(self, message: str) -> NoReturn:
        takes_a_job = any(action.dest == "job" for action in self._actions)
        if takes_a_job and message.startswith("unrecognized arguments"):
            message += "; the job's own options come after --"
        value = re.compile(r"(--[A-Za-z][\w-]*)[= ](\S+)")
        super().error(value.sub(lambda found: f"{found[1]} {HIDDEN}" if is_secret(found[1]) else found[0], one_line(message)))


def new_parser(verb: str, description: Optional[str], allow_abbrev: bool = True) -> Parser:
    """Return a parser whose help shows the description with its line ends."""
    return Parser(
        prog=f"python -m launch {verb}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return (the verb's own words, the job's): the job's stand after --."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def missing_job(path: Union[str, Path], folder: Union[str, Path] = "") -> Optional[str]:
    """What is wrong with the path of a job's file; a relative path is one below `folder`."""
    if os.path.isfile(os.path.join(folder, path)):
        return None
    return f"there is no job {one_line(path)}: give a job's file, such as jobs/train_ddp.py"


def exit_code(work: Callable[[], Optional[int]], place: Optional[str] = None) -> int:
    """Call `work`. An error that its user can mend is one line on stderr and an exit code, any other is raised.

    `place`: where `work` writes, for an error of the system that names no file, such as that of a full disk.
    """
    try:
        return work() or 0
    except (UserError, TrainingFailed) as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        words = (error.filename or place, error.strerror or error)
        print(f"error: {': '.join(one_line(word) for word in words if word)}", file=sys.stderr, flush=True)
        return of_a_file(error, "").exit_code
    except KeyboardInterrupt:
        return 130
