"""Which sample takes the place of one that cannot be decoded: the next that can, the same in every run and on every rank."""

from typing import Callable, TypeVar

from common.errors import TrainingFailed, one_line
from datasets.photos.decode import Undecodable

Decoded = TypeVar("Decoded")


class Substitutes:
    """Of one data set. Each sample that cannot be decoded is named once in each process."""

    def __init__(self, what: str, most: int) -> None:
        """`what`: what the samples are called; `most`: how many are tried in a row until the data set is taken for damaged."""
        self._what, self._most = what, most
        self._named: set[int] = set()

    def decode(
        self, number: int, count: int, decode: Callable[[int], Decoded], name: Callable[[int], str]
    ) -> tuple[int, Decoded]:
        """(the sample that is used, `decode` of it): `number`, or the next of the `count` samples that can be decoded."""
        for step in range(self._most):
            used = (number + step) % count
            try:
                return used, decode(used)
            except (Undecodable, OSError) as error:
                self._warn(used, one_line(name(used)), error)
        raise TrainingFailed(
            f"{self._most} {self._what} in a row cannot be decoded, from {one_line(name(number))}: fetch the data set again"
        )

    def _warn(self, number, name, error):
        if number not in self._named:
            self._named.add(number)
            print(f"warning: {name} cannot be decoded ({one_line(error)[:100]}): the next one takes its place", flush=True)
