"""What shards and tables say of a picture's class: its number, counted from 0, or its name.

A number is a number in every form: 1, "1" and 1.0 are the class whose name is on the second line of a file of
names.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from common.errors import UserError, one_line

Label = Union[int, str]

FILES = ("cls", "json")  # the endings of the files beside a picture that may have its label
NO_CLASS = -1
MOST_DIGITS = 9  # of the number of a class
MOST_CLASSES = 100_000  # where nothing names them
NAMES = "classnames.txt"  # the file beside the shards that names their classes, one a line
NUMBER = re.compile(r"(?P<whole>[+-]?[0-9]+)(\.(?P<rest>[0-9]*))?")


class Unclear(ValueError):
    """What is said of a class cannot be meant. The text names where it is said."""


def parse(value: object, source: str) -> Optional[Label]:
    """Return the label that a text, or a value of JSON or of a table, is; None if it is empty.

    Unclear, if it is neither NO_CLASS, nor a whole number from 0, nor a name. `source`: where it was read.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str, type(None))):
        raise Unclear(f"the label in {source} is neither a number nor a name")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value).strip()
    number = NUMBER.fullmatch(text)
    is_fraction = bool(number and (number["rest"] or "").strip("0"))
    if is_fraction or (isinstance(value, float) and not number):
        raise Unclear(f"the label in {source} is {one_line(text)[:40]}, which is no whole number")
    if not number:
        return text or None
    digits = number["whole"].lstrip("+-0")
    if len(digits) > MOST_DIGITS:
        raise Unclear(f"the label in {source} has {len(digits)} digits, too many for the number of a class")
    label = int(number["whole"])
    if label < NO_CLASS:
        raise Unclear(
            f"the label in {source} is {label}: classes are counted from 0, and {NO_CLASS} is for none"
        )
    return label


def of_sample(key: str, by_ending: Mapping[str, Optional[Label]]) -> Optional[Label]:
    """Return the label of the sample `key` of a shard, or None if it has none.

    `by_ending`: what KEY.cls and KEY.json say, if they are there. A number and a name need not disagree:
    KEY.cls counts. Where neither says anything, the label is the name of KEY's folder, unless there is an
    empty KEY.cls.
    """
    labels = [label for label in (by_ending.get(ending) for ending in FILES) if label is not None]
    if len(labels) == len(FILES) and type(labels[0]) is type(labels[1]) and labels[0] != labels[1]:
        both = " and ".join(f"{one_line(label)[:40]} in .{ending}" for ending, label in zip(FILES, labels))
        raise Unclear(f"{one_line(key)[:80]} has the label {both}")
    if labels:
        return None if labels[0] == NO_CLASS else labels[0]
    return None if "cls" in by_ending else os.path.basename(os.path.dirname(key)) or None


def read_names(path: str) -> list[str]:
    """Return the names of the classes in a file, one a line."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{one_line(path)} has no names of classes ({one_line(error)}): one a line, in UTF-8"
        ) from None
    return parse_names(content, path)


def parse_names(content: bytes, source: str) -> list[str]:
    """Return the names of the classes in the bytes of a file, one a line."""
    try:
        lines = content.decode("utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{one_line(source)} has no names of classes ({one_line(error)}): one a line, in UTF-8"
        ) from None
    names = [line.strip() for line in lines]
    require_distinct_names(names, source)
    return names


def require_distinct_names(names: Sequence[str], source: str) -> None:
    """Raise UserError if two classes have one name, or one has none."""
    if "" in names or len({*names}) < len(names):
        raise UserError(
            f"{one_line(source)} has an empty name of a class, or a name twice: give each class its own"
        )


def number_classes(
    examples: Mapping[Label, str], names: Sequence[str], place: str
) -> tuple[list[str], dict[Label, int]]:
    """Return the names of the classes, and the number of each label.

    All labels have to be numbers, or all names.

    `examples`: for each label, what has it, to be named in an error. `names`: of the classes, empty if
    nothing names them.
    """
    numbers = sorted(label for label in examples if isinstance(label, int))
    words = sorted(label for label in examples if isinstance(label, str))
    if numbers and words:
        number = numbers[0]
        word = words[0]
        raise UserError(
            f"{one_line(place)} has numbers and names of classes: {number} of "
            f"{one_line(examples[number])[:80]} and {one_line(word)[:80]} of "
            f"{one_line(examples[word])[:80]}: give all pictures the one, or all the other"
        )
    if not numbers and not words:
        raise UserError(f"{one_line(place)} has no picture with a class")
    if numbers and not names:
        if numbers[-1] >= MOST_CLASSES:
            example = f"class {numbers[-1]} ({one_line(examples[numbers[-1]])[:80]})"
            raise UserError(
                f"{one_line(place)} has {example}, and a number is a place among the classes, counted from 0 "
                f"and below {MOST_CLASSES}: number them anew, or give names in place of numbers"
            )
        names = [str(number) for number in range(numbers[-1] + 1)]
    names = names or words
    number_of: dict[Label, int] = {
        label: number for number, label in enumerate(range(len(names)) if numbers else names)
    }
    for label in (*numbers, *words):
        if label not in number_of:
            example = f"class {one_line(label)[:80]} ({one_line(examples[label])[:80]})"
            raise UserError(
                f"{one_line(place)} has {example}, and {len(names)} names of classes: give --classes FILE"
            )
    return [*names], {label: number_of[label] for label in examples}
