"""Fill the shared sample cache before a job, look at it, remove a folder's images from it.

    export KSPEED_IPLIST=host:11211,host2:11211
    python -m launch kspeed preload imagenet     put every image into the cache that is not there yet
    python -m launch kspeed load imagenet        the same, but what is there is read back and verified
    python -m launch kspeed display              the servers; with a folder, how many of its images are there
    python -m launch kspeed remove imagenet      delete its images, and nothing else (also: rm)
    python -m launch kspeed size PHOTOGRAPH      how many bytes of it are in the cache
    python -m launch kspeed get PHOTOGRAPH FILE  write them to a file

The servers are plain memcached with enough memory: `memcached -m 200000 -I 16m -U 0 -l 10.0.0.7`, and with
`-Y FILE` (a line user:password) for a login, whose password is in KSPEED_PASSWORD. The key of an image has
the names of its folder and of the folder above, its size and its time of change, so give the folder that the
job reads.
"""

import argparse
import functools
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable

from common.arguments import WORKERS
from common.errors import TrainingFailed, UserError, one_line
from common.files import write_atomically
from common.progress import Progress
from datasets.kspeed import NOT_STORED, STORED, TOO_LARGE, SampleCache, name_of, samples
from datasets.photos import files
from launch.options import new_parser, run_for_exit_code

DEADLINE = 2  # seconds for one image; a job allows less


def roots(folder: str) -> list[str]:
    """Return the folders whose images a job reads: train and val below `folder`,
    or `folder` itself if it has neither."""
    if not os.path.isdir(folder):
        raise UserError(f"{one_line(folder)} does not exist: give the folder of the data set")
    folder = os.path.normpath(folder)
    splits = [os.path.join(folder, split) for split in ("train", "val")]
    return [split for split in splits if os.path.isdir(split)] or [folder]


def for_all(options: argparse.Namespace, work: Callable[..., Any]) -> tuple[Counter[Any], Counter[Any]]:
    """Call `work(key, path, stat)` for each image of options.root.

    Return {result: number of images} and {result: bytes}.
    """
    paths_of = {
        root: [os.path.join(root, name) for name in files.images_below(root)] for root in roots(options.root)
    }
    if not any(paths_of.values()):
        raise UserError(f"{one_line(options.root)} holds no image: give the folder of the data set")
    counts = Counter()
    sizes = Counter()
    with Progress(f"{options.verb} {options.root}", sum(map(len, paths_of.values())), "images") as progress:
        for root, paths in paths_of.items():
            for outcome, size in samples.for_each(root, paths, options.threads, work):
                counts[outcome] += 1
                sizes[outcome] += size
                progress.add(1, size)
    return counts, sizes


def fill(cache: SampleCache, options: argparse.Namespace) -> None:
    """Put the missing images of a folder into the cache, and print counts;
    the verb load verifies the rest."""
    verify = options.verb == "load"
    began = time.monotonic()
    counts, sizes = for_all(options, functools.partial(samples.put, cache, verify=verify))
    seconds = time.monotonic() - began
    megabytes = sum(sizes.values()) / 1e6
    images = sum(counts.values())
    hits = counts[samples.CACHED]
    hits_text = f"{hits} hits, {images - hits} misses" if verify else f"{hits} were there"
    problems = {
        TOO_LARGE: "refused as too large (memcached -I)",
        NOT_STORED: "not stored",
        samples.UNREADABLE: "unreadable",
    }
    print(
        f"{images} images, {megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s): "
        f"{hits_text}, {counts[STORED]} put there"
        + "".join(f", {counts[outcome]} {text}" for outcome, text in problems.items() if counts[outcome])
    )


def remove(cache: SampleCache, options: argparse.Namespace) -> None:
    """Delete the images of a folder from the cache, and print how many it had."""
    counts, sizes = for_all(options, lambda key, *_: cache.delete(key))
    print(
        f"{counts[True]} images deleted, {sizes[True] / 1e6:.1f} MB; "
        f"{sum(counts.values()) - counts[True]} were not there"
    )


def display(cache: SampleCache, options: argparse.Namespace) -> None:
    """Print the state of each server and, given a folder, how many of its images the cache has."""
    for server, status in cache.status().items():
        if not status:
            print(f"{name_of(server):24} down")
            continue
        lookups = status.get("get_hits", 0) + status.get("get_misses", 0)
        rate = f"{status['get_hits'] / lookups:.1%}" if lookups else "none asked"
        used, limit = (status.get(name, 0) / 1e6 for name in ("bytes", "limit_maxbytes"))
        print(
            f"{name_of(server):24} up    items {status.get('curr_items')}, {used:.1f} of {limit:.1f} MB, hit "
            f"rate {rate}, evictions {status.get('evictions')}, memcached "
            f"{status.get('version', b'').decode()}"
        )
    if options.root:
        counts, sizes = for_all(options, lambda key, *_: cache.has(key))
        print(
            f"{counts[True]} of {sum(counts.values())} images of {one_line(options.root)} are there, "
            f"{sizes[True] / 1e6:.1f} of {sum(sizes.values()) / 1e6:.1f} MB"
        )


def show_image(cache: SampleCache, options: argparse.Namespace) -> None:
    """Print how many bytes of one image the cache has; the verb get also writes them to a file."""
    path = os.path.abspath(options.image)
    try:
        info = os.stat(path)
    except OSError as error:
        raise UserError(
            f"{one_line(options.image)}: {error.strerror}: its size and time are a part of its key"
        ) from None
    content = cache.get(samples.sample_key(root_of(path), path, info))
    if content is None:
        raise TrainingFailed(
            f"{one_line(options.image)} is not in the cache: python -m launch kspeed preload puts it there"
        )
    print(f"{len(content)} bytes")
    if options.verb == "get":
        write_atomically(options.file, content)


def root_of(path: str) -> str:
    """Return the folder that a job reads this image from: train or val above it,
    else the parent of its class's folder."""
    above = [folder for folder in Path(path).parents if folder.name in ("train", "val")]
    return str(above[0] if above else Path(path).parent.parent)


# Verbs of Alibaba's KSpeed for which memcached has no command.
ABSENT = {
    "adduser": (
        "users are lines user:password of the file that memcached -Y reads: add one and start it again"
    ),
    "deluser": (
        "users are lines user:password of the file that memcached -Y reads: delete one and start it again"
    ),
    "passwd": (
        "passwords are in the file that memcached -Y reads: change it there, start it again, and set "
        "KSPEED_PASSWORD"
    ),
}

VERBS = {
    "preload": (
        fill,
        "put every image into the cache that is not there yet; that it is there is known by its key alone",
    ),
    "load": (fill, "read every image back from the cache, verify it, and put there what is missing"),
    "display": (
        display,
        "each server: items, memory, hit rate, evictions, version; with ROOT, how many of its images it has",
    ),
    "size": (show_image, "how many bytes of a photograph are in the cache"),
    "get": (show_image, "write a photograph, as the cache has it, to a file"),
    "remove": (
        remove,
        (
            "delete the images of this folder as its files are now; those of files that have changed since "
            "age out"
        ),
    ),
}


ALIASES = {"remove": ["rm"]}


def main(argv: list[str]) -> int:
    if argv and argv[0] in ABSENT:
        print(f"error: {argv[0]}: {ABSENT[argv[0]]}", file=sys.stderr)
        return 2
    parser = new_parser("kspeed", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (work, help_text) in VERBS.items():
        sub = verbs.add_parser(verb, help=help_text, description=help_text, aliases=ALIASES.get(verb, []))
        sub.set_defaults(verb=verb)
        nargs = "?" if verb == "display" else None
        if work is show_image:
            sub.add_argument(
                "image", metavar="PHOTOGRAPH", help="the file that is in the cache, below train or val"
            )
        else:
            sub.add_argument(
                "root", nargs=nargs, metavar="ROOT", help="a folder with train and val in it, or with images"
            )
        if verb == "get":
            sub.add_argument("file", metavar="FILE", help="where its bytes are written to")
        sub.add_argument("--iplist", help="the servers, HOST:PORT,HOST:PORT; unset: those of KSPEED_IPLIST")
        sub.add_argument(
            "--user", help="for servers with a login, whose password is in KSPEED_PASSWORD; unset: no login"
        )
        sub.add_argument(
            "--threads",
            type=WORKERS,
            default=samples.THREADS,
            help=f"images at a time (default: {samples.THREADS})",
        )
    options = parser.parse_args(argv)
    return run_for_exit_code(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Run the verb; TrainingFailed if a server does not answer, or if none does and it needs one."""
    cache = samples.open_cache(options.iplist, options.user, deadline=DEADLINE)
    if options.verb != "display" and not any(cache.status().values()):
        raise TrainingFailed("no cache server answers: start one, or check --iplist and KSPEED_IPLIST")
    VERBS[options.verb][0](cache, options)
    if failing_servers := cache.servers.failing():
        raise TrainingFailed(
            f"no answer from {', '.join(map(name_of, failing_servers))}: start what is down, or leave "
            "it out of --iplist"
        )
