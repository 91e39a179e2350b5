"""One row in this process: python -m tests.gpu.one ROW FOLDER. What it found goes to FOLDER/result.json."""

import sys
import traceback
from pathlib import Path

from tests.gpu.rows import Missing, Row
from tests.gpu.table import ROWS


def main(name, folder):
    row, answer = Row(name, Path(folder)), {}
    try:
        ROWS[name].measure(row)
    except Missing as error:
        answer["missing"] = str(error)
    except Exception as error:
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"[:2000]
    row.save(**answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
