"""All tests, and once more, alone, each that has failed: python -m tests [OPTIONS OF PYTEST]

One that passes then does not make the run red, but the last lines name it: it is a defect of the test, to be mended. More than
three are no chance.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3


def failed(options):
    """(the exit code of pytest, the tests that have failed)"""
    with tempfile.TemporaryDirectory() as cache:
        code = subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *options]).returncode
        listed = Path(cache) / "v" / "cache" / "lastfailed"
        return code, list(json.loads(listed.read_text())) if listed.exists() else []


def main(options):
    code, once = failed(options)
    if code != 1 or not 0 < len(once) <= MOST:
        return code
    print(f"\nonce more, alone: {', '.join(once)}", flush=True)
    code, twice = failed(["-n", "0", "-m", "", *once])
    passed = [name for name in once if name not in twice]
    if passed:
        print(f"\n{len(passed)} passed at the second try: {', '.join(passed)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
