"""Attack everything for some minutes, print what became of it, and exit with 1 if anything went by unnoticed.

make attack            # an hour
MINUTES=2 make attack
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from attack.damage import attack_run, attack_store, attack_unfinished_run, attack_unfinished_store
from attack.foreign import attack_foreign
from attack.processes import attack_by_full_disk, attack_by_kills, attack_by_race
from attack.scene import Scene, build
from attack.tally import Tally

_JOBS = ("harvest", "distill", "transfer", "live")


def one_round(scene: Scene, scratch: Path, number: int, tally: Tally) -> None:
    """Do some of everything; the number of the round decides what."""
    draws = random.Random(number)
    job = _JOBS[number % len(_JOBS)]
    for _ in range(6):
        attack_store(scene, scratch, draws, tally)
        attack_run(scene, scratch, draws, tally)
    attack_unfinished_store(scene, scratch, draws, tally)
    attack_unfinished_run(scene, scratch, draws, tally)
    for killed in _JOBS:
        attack_by_kills(scene, killed, scratch, draws, tally, at_most=4)
    attack_by_full_disk(scene, job, scratch, draws, tally)
    if number % 3 == 0:
        attack_by_race(scene, job, scratch, draws, tally)
    attack_foreign(250, scratch / "foreign", number, tally)


def main() -> None:
    """Attack until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first round")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a fork does not inherit threads
    tally, number, end = Tally(), options.seed, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="dmsae-attack-") as scratch:
        scene = build(Path(scratch) / "scene")
        shown = 0
        while time.monotonic() < end:
            one_round(scene, Path(scratch), number, tally)
            number += 1
            for example in tally.examples[shown:]:
                print(f"{example}\n", file=sys.stderr)
            shown = len(tally.examples)
            left = max(0, round((end - time.monotonic()) / 60))
            found = f"{tally.total:,} attempts, {tally.n_kills} kills, {len(tally.examples)} found"
            print(f"{number - options.seed} rounds, {found}, {left} min left", file=sys.stderr)
    print(f"{number - options.seed} rounds from {options.seed}, {tally.total:,} attempts, {tally.n_kills} kills\n")
    print(tally.table())
    for example in tally.examples:
        print(f"\n{example}")
    sys.exit(not tally.is_clean)


if __name__ == "__main__":
    main()
