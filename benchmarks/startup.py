"""How fast commands start, beside importing the two libraries that the command line is built on.

Each turn runs every contestant once in a fresh process, in random order, so that a busy machine slows all of them; the
ratio of a command is the median over turns of its time over the baseline's in the same turn.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time

N_TURNS = 15
BASELINE = "import tyro, rich"
COMMANDS = {
    "dmsae --version": ["--version"],
    "dmsae --help": ["--help"],
    "dmsae store list": ["store", "list"],
    "dmsae assets list": ["assets", "list"],
    "dmsae status RUN": ["status"],
    "dmsae core show --help": ["core", "show", "--help"],
    "dmsae distill --help (imports torch)": ["distill", "--help"],
}
LIMIT = 4.0
"""The aim for commands that need no tensors."""


def seconds(arguments: list[str]) -> float:
    """Return how long a process takes."""
    start = time.perf_counter()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print a table, and the figures as one line of JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = {name: [sys.executable, "-m", "dmsae", *rest] for name, rest in COMMANDS.items()}
        arguments["dmsae store list"] += ["--root", scratch]
        arguments["dmsae status RUN"] += [scratch]
        arguments[BASELINE] = [sys.executable, "-c", BASELINE]
        times: dict[str, list[float]] = {name: [] for name in arguments}
        for command in arguments.values():  # once for the file cache
            seconds(command)
        for _ in range(N_TURNS):
            for name in random.sample(list(arguments), len(arguments)):
                times[name].append(seconds(arguments[name]))
    print(f"{'command':40} {'seconds':>8} {'× baseline':>11}")
    ratios = {}
    for name in [BASELINE, *COMMANDS]:
        ratios[name] = statistics.median(t / base for t, base in zip(times[name], times[BASELINE], strict=True))
        print(f"{name:40} {statistics.median(times[name]):8.2f} {ratios[name]:11.1f}")
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"benchmark": "startup", "turns": N_TURNS, "limit": LIMIT, "seconds": medians, "ratio": rounded}))


if __name__ == "__main__":
    main()
