"""Trains two commits side by side and compares their losses: a refactor changes no number.

    python tools/compare_commits.py main HEAD --preset laptop-melodi --steps 20
    python tools/compare_commits.py v0.1.0 HEAD --tolerance 0        # bit for bit

Each commit is checked out into a temporary folder of its own and run by this Python. Both train on
the same store, made by the first. Exits with 1 if a loss differs by more than the tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_out(commit: str, folder: Path) -> Path:
    subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(folder), commit],
        check=True,
    )
    return folder


def melodi(checkout: Path, *args: str) -> None:
    """Runs the `melodi` command of a checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run([sys.executable, "-m", "melodi", *args], cwd=checkout, env=env, check=True)


def losses(checkout: Path, store: Path, options: argparse.Namespace) -> list[float]:
    run = checkout / "compared-run"
    settings = ["--preset", options.preset, "--steps", str(options.steps), "--log-every", "1"]
    settings += ["--seed", str(options.seed), "--threads", str(options.threads)]
    melodi(checkout, "train", *settings, "--data", str(store), "--out", str(run))
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs=2)
    parser.add_argument("--preset", default="laptop-melodi")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference in nats")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkouts: list[Path] = []
        try:
            for i, commit in enumerate(options.commits):
                checkouts.append(check_out(commit, Path(folder) / str(i)))
            store = Path(folder) / "store"
            melodi(checkouts[0], "prepare", "--out", str(store))
            ours, theirs = (losses(checkout, store, options) for checkout in checkouts)
        finally:
            for checkout in checkouts:
                remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(checkout)]
                subprocess.run(remove, check=False)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        print(f"step {step:4}   {a:.6f}   {b:.6f}   {b - a:+.2e}")
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference {worst:.2e} nats over {len(ours)} steps of {options.preset}")
    sys.exit(worst > options.tolerance)


if __name__ == "__main__":
    main()
