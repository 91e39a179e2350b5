"""The messages between the nodes of a job: each is a line of JSON and must have the form that is defined
here."""

import contextlib
import ipaddress
from typing import Any, Callable

from common.alive import heartbeat
from common.errors import STOP_SIGNALS


def integer(minimum: int, maximum: int) -> Callable:
    """Return a check for an int within these bounds, which may reach them."""
    return lambda value: type(value) is int and minimum <= value <= maximum


def text(max_length: int) -> Callable:
    """Return a check for a string of at most so many characters."""
    return lambda value: isinstance(value, str) and len(value) <= max_length


def is_bool(value: object) -> bool:
    return type(value) is bool


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12


def is_true(value: object) -> bool:
    return value is True


def is_dict(value: object) -> bool:
    return isinstance(value, dict)


def record(optional: tuple = (), **fields: Callable) -> Callable:
    """Return a check for a dict with these fields and no others, each of its form;
    the `optional` ones may be missing."""

    def fits(value: Any) -> bool:
        is_known = isinstance(value, dict) and set(value) <= set(fields)
        return is_known and all(
            check(value[name]) if name in value else name in optional for name, check in fields.items()
        )

    return fits


def is_address(value: object) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    return False


RANK = integer(0, 10**7)
STEPS = integer(0, 1 << 62)
PORT = integer(1, 65535)
STATUS = record(
    rank=RANK, steps=STEPS, idle=is_number, median=is_number,
    phase=lambda value: value in list(heartbeat.PHASES), waits=text(200), waiting=is_bool,
)  # fmt: skip
STALL = record(
    late=lambda value: value is None or STATUS(value), last=lambda value: value is None or STATUS(value),
    idle=is_number, median=is_number, training=is_bool, waiting=is_bool,
)  # fmt: skip
REPORT = record(
    optional=("stack_of",), text=text(4000), direct=is_bool, code=integer(0, 255), restart=is_bool,
    stack_of=RANK,
)  # fmt: skip
GO = record(optional=("more",), attempt=integer(0, 10**6), address=is_address, port=PORT, more=is_dict)


def several(form: Callable, max_length: int = 10**6) -> Callable:
    """Return a check for a list of values of this form, with a maximum length."""
    return lambda value: isinstance(value, list) and len(value) <= max_length and all(map(form, value))


def each(*forms: Callable) -> Callable:
    """Return a check for a list with one value for each of these forms, in their order."""

    def fits(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != len(forms):
            return False
        return all(form(item) for form, item in zip(forms, value))

    return fits


# The messages with which a connection begins. What "more" is in them, and in GO, common/elastic checks.
HELLO = record(
    optional=("findings", "more"), findings=lambda value: isinstance(value, list),  # of the doctor
    more=is_dict,
    app=text(100), job=text(1000), host=text(1000),
    node=integer(0, 10**6), nodes=integer(1, 10**6), workers=integer(1, 10**6),
    alike=is_dict, clock=is_number,
)  # fmt: skip
PROOF = record(nonce=text(64), proof=text(64))

# Every later message has exactly one of these keys; common/elastic adds its own.
FORMS = {
    "beat": is_true, "waiting": is_true, "finished": is_true, "end": is_true, "refused": text(4000), "go": GO,
    "verdict": REPORT, "fault": REPORT, "status": STALL, "ready": integer(0, 10**6),
    "stop": lambda value: type(value) is int and value in STOP_SIGNALS,
}  # fmt: skip


def is_valid(message: dict) -> bool:
    """Whether this is one message of a known kind (FORMS), in the form of that kind."""
    return len(message) == 1 and all(name in FORMS and FORMS[name](value) for name, value in message.items())
