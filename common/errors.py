"""How a job ends when something is wrong: one line on stderr and a documented exit code, no traceback for a user's mistake.

0    finished, or stopped on purpose (--max_hours): start again to go on
1    the training itself failed (a loss that is not a number, a lost node), or the doctor has found something bad
2    asked for something impossible; the line says what was given, what is allowed and what to do
130  interrupted with Ctrl-C, after saving
143  stopped by the platform (SIGTERM), after saving
"""

import os
import re
import signal
import sys
import traceback

from common import pulse

# What asks a job to stop, and the exit code of each; SLURM gives its early warning with USR1.
STOP_SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 143}


class UserError(ValueError):
    """What was given, what is allowed, what to do: in one line."""

    exit_code = 2


class TrainingFailed(RuntimeError):
    """The run cannot go on, through no mistake in the way it was started."""

    exit_code = 1


def one_line(text):
    """`text` with line ends and control characters made visible: a file name must not be able to forge a log line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(text))


AT_FAILURE = []  # functions that save what can be saved when a job fails, in a few seconds at most


def run_job(main):
    """Call a job's `main` and leave with the exit code above."""
    try:
        _with_last_words(main)
    except (UserError, TrainingFailed) as error:
        if pulse.has_parent():  # which says it once for all ranks
            _leave(one_line(error), error.exit_code)
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before there was anything to save
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone (`... | head`); there is nobody to tell
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if not pulse.has_parent():
            raise
        if not is_victim(error):
            traceback.print_exc()
        _leave(f"{type(error).__name__}: {one_line(error)[:300]}", 1, is_victim(error))


def _with_last_words(main):
    try:
        main()
    except Exception:
        for function in AT_FAILURE:
            function()
        raise


def _leave(text, code, victim=False):
    """Without waiting for the collectives of a broken group, which would abort the process or hang it."""
    pulse.report_fault(text, code, victim)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_victim(error):
    """Whether this is a collective that broke because another rank has gone."""
    names = {kind.__name__ for kind in type(error).__mro__}
    spoken = re.search(r"gloo|nccl|TCPStore|socket|connection (closed|reset|refused)|broken pipe", str(error), re.IGNORECASE)
    return "DistError" in names or (isinstance(error, RuntimeError) and spoken is not None)
