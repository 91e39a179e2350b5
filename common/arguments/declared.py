"""What a parser declares, which argparse keeps to itself: its options, their names and their groups."""

import argparse
from collections.abc import Sequence
from typing import Optional

Group = argparse._ArgumentGroup


def actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Return the options, and the arguments without a name."""
    return parser._actions


def option(parser: argparse.ArgumentParser, name: str) -> Optional[argparse.Action]:
    """Return the option with this name, such as --epochs or -e; None if there is none."""
    return parser._option_string_actions.get(name)


def add_name(parser: argparse.ArgumentParser, action: argparse.Action, name: str) -> None:
    """Give an option another name, with its dashes."""
    action.option_strings = [*action.option_strings, name]
    parser._option_string_actions[name] = action


def groups(parser: argparse.ArgumentParser) -> Sequence[Group]:
    return parser._action_groups
