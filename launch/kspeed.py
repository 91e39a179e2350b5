"""The shared sample cache, seen from outside: fill it before a job, look at it, take a tree out of it again.

    export KSPEED_IPLIST=host:11211,host2:11211
    python -m launch kspeed preload imagenet            every image that is not there yet is read and put there
    python -m launch kspeed load imagenet               the same, but what is there is read back and verified
    python -m launch kspeed display                     the servers; with a folder, how much of it is there
    python -m launch kspeed remove imagenet             its images are deleted, and nobody else's

The servers are plain memcached, with room: `memcached -m 200000 -I 16m -U 0 -l 10.0.0.7`, and with `-Y FILE` (a line
user:password) for a login; the password is taken from KSPEED_PASSWORD. A job finds what was put there by the name of the
folder and of the one around it, and by each file's size and time of change, so give the folder that the job reads.
"""

import collections
import functools
import os
import time

from common.errors import TrainingFailed, UserError, one_line
from common.progress import Progress
from datasets.kspeed import NOT_STORED, STORED, TOO_LARGE, name_of, samples
from launch.options import exit_code, new_parser

DEADLINE = 2  # seconds for one image: here nobody waits for it


def roots(folder):
    """The folders whose images a job asks for."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} does not exist: give the folder of the data set")
    folder = os.path.normpath(folder)
    splits = [os.path.join(folder, split) for split in ("train", "val")]
    return [split for split in splits if os.path.isdir(split)] or [folder]


def over_all(options, function):
    """{what came of it: images} and {...: megabytes} over the images of all roots, with a bar on a terminal."""
    found = {root: samples.image_paths(root) for root in roots(options.root)}
    if not any(found.values()):
        raise UserError(f"{options.root} holds no image")
    counts: collections.Counter = collections.Counter()
    sizes: collections.defaultdict = collections.defaultdict(float)
    with Progress(options.root, sum(map(len, found.values())), "images") as progress:
        for root, paths in found.items():
            for outcome, size in samples.for_each(root, paths, options.threads, function):
                counts[outcome] += 1
                sizes[outcome] += size / 1e6
                progress.add(1, size)
    return counts, sizes


def fill(cache, options):
    verify, began = options.verb == "load", time.monotonic()
    counts, sizes = over_all(options, functools.partial(samples.put, cache, verify=verify))
    seconds, megabytes, all_of_them = time.monotonic() - began, sum(sizes.values()), sum(counts.values())
    hits = counts[samples.THERE]
    first = f"{hits} hits, {all_of_them - hits} misses" if verify else f"{hits} were there"
    rest = {TOO_LARGE: "refused as too large (memcached -I)", NOT_STORED: "not stored", samples.UNREADABLE: "unreadable"}
    print(
        f"{all_of_them} images, {megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s): {first}, "
        f"{counts[STORED]} put there"
        + "".join(f", {counts[outcome]} {text}" for outcome, text in rest.items() if counts[outcome])
    )


def remove(cache, options):
    counts, sizes = over_all(options, lambda key, *_: cache.delete(key))
    print(f"{counts[True]} images deleted, {sizes[True]:.1f} MB; {sum(counts.values()) - counts[True]} were not there")


def display(cache, options):
    for server, told in cache.status().items():
        if not told:
            print(f"{name_of(server):24} down")
            continue
        asked = told.get("get_hits", 0) + told.get("get_misses", 0)
        rate = f"{told['get_hits'] / asked:.1%}" if asked else "none asked"
        used, limit = (told.get(name, 0) / 1e6 for name in ("bytes", "limit_maxbytes"))
        print(
            f"{name_of(server):24} up    items {told.get('curr_items')}, {used:.1f} of {limit:.1f} MB, hit rate {rate}, "
            f"evictions {told.get('evictions')}, memcached {told.get('version', b'').decode()}"
        )
    if options.root:
        counts, sizes = over_all(options, lambda key, *_: cache.has(key))
        print(
            f"{counts[True]} of {sum(counts.values())} images of {one_line(options.root)} are there, "
            f"{sizes[True]:.1f} of {sum(sizes.values()):.1f} MB"
        )


VERBS = {
    "preload": (fill, "read every image that is not there yet and put it there; what is there is known by its key alone"),
    "load": (fill, "read every image back from the cache and verify it, and put there what is missing"),
    "display": (display, "each server: items, memory, hit rate, evictions, version; with ROOT, how much of it is there"),
    "remove": (remove, "delete the images of this folder as its files are now; what was put there of earlier states ages out"),
}


def main(argv):
    parser = new_parser("kspeed", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (_, what) in VERBS.items():
        one = verbs.add_parser(verb, help=what, description=what)
        shown = verb == "display"
        one.add_argument("root", nargs="?" if shown else None, metavar="ROOT", help="train/ and val/ in it, or else itself")
        one.add_argument("--iplist", help="the servers, host:port,host:port; unset: KSPEED_IPLIST")
        one.add_argument("--user", help="for servers with a login, whose password KSPEED_PASSWORD holds; unset: no login")
        one.add_argument("--threads", type=int, default=samples.THREADS, help=f"images at a time (default: {samples.THREADS})")
    options = parser.parse_args(argv)
    if options.threads < 1:
        parser.error("--threads is at least 1")
    return exit_code(lambda: run(options))


def run(options):
    cache = samples.open_cache(options.iplist, options.user, deadline=DEADLINE)
    if options.verb != "display" and not any(cache.status().values()):
        raise TrainingFailed("no cache server answers: see --iplist, or KSPEED_IPLIST")
    VERBS[options.verb][0](cache, options)
    if unreached := cache.unreached():
        raise TrainingFailed(f"no help from {', '.join(map(name_of, unreached))}")
