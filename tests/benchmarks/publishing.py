"""What publishing costs the training: epochs whose every checkpoint goes to a bucket, beside epochs that only write it.

    python -m tests.benchmarks.publishing [--rounds 5]       (make bench)

The two forms take turns, each a whole job on one core; the store, rclone's, has the other one. A checkpoint every fourth step,
which is far more often than anybody saves.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import rows
from tests.benchmarks.base import machine
from tests.benchmarks.storage import KEY, SECRET, get_programs, serve
from tests.tools.jobs import command, environment

OPTIONS = ["--custom_data", "true", "--max_samples", 1024, "--batch_size", 64, "--width", 32, "--epochs", 2, "--save_steps", 4]


def train(folder, output, env):
    """Seconds of the epochs, as the log states them."""
    script = ["taskset", "-c", "0", *command("train", *OPTIONS, "--output_dir", output)]
    done = subprocess.run(script, cwd=folder, env=environment(**env), capture_output=True, text=True, check=True)
    return sum(
        float(seconds) for seconds in re.findall(r"^\S+ epoch=\d+/\d+ steps=.* seconds=([\d.]+)", done.stdout, re.MULTILINE)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        folder = Path(folder)
        rclone, _ = get_programs(folder / "programs")
        (folder / "store" / "data").mkdir(parents=True)
        server, endpoint = serve(rclone, folder / "store")
        subprocess.run(["taskset", "-a", "-p", "-c", "1", str(server.pid)], check=True, capture_output=True)
        env = {
            "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        ratios, sent = [], 0
        try:
            for number in range(options.rounds):
                alone = train(folder, f"{folder}/out{number}", {})
                ratios.append(train(folder, f"s3://data/out{number}", env) / alone)
                sent = sum(
                    path.stat().st_size for path in (folder / "store" / "data" / f"out{number}").rglob("*") if path.is_file()
                )
        finally:
            server.terminate()
            server.wait()
    rows.keep("epochs that publish every checkpoint", "epochs that only write it", [1 / ratio for ratio in ratios])
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(
        f"{machine()}; {options.rounds} rounds\n\nEpochs that publish every checkpoint take {middle:.3f} ({low:.3f} to {high:.3f}) "
        f"of the time; {sent / 2**20:.0f} MiB were in the bucket at the end."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
