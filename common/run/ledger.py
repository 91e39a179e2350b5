"""Which samples were trained on, step by step: the evidence that no restart loses or repeats one (--ledger true).

ledger/rank_R.jsonl, append-only: a line {"start": [epoch, consumed], "t": ...} for every start, and a line {"step": [epoch,
consumed], "ids": [...], "t": ...} for every step. A step counts unless a later start begins at it or before it.
tests/check_ledger.py adds them up.
"""

import json
import os
import time
from typing import Any

import torch


class Ledger:
    def __init__(self, output_dir: str, rank: int, active: bool, epoch: int, consumed: int):
        self._file: Any = None
        if active:
            os.makedirs(os.path.join(output_dir, "ledger"), exist_ok=True)
            self._file = open(  # noqa: SIM115 (it stays open for the whole run)
                os.path.join(output_dir, "ledger", f"rank_{rank}.jsonl"), "ab", buffering=0
            )
            self._write({"start": [epoch, consumed]})

    def step(self, epoch: int, consumed: int, ids: torch.Tensor) -> None:
        if self._file:
            self._write({"step": [epoch, consumed], "ids": ids.tolist()})

    def _write(self, line):
        self._file.write(json.dumps({**line, "t": time.time()}).encode() + b"\n")
