"""A whole analysis made of single steps, its undisturbed results, and how disturbed ones are compared with them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from workflow_cases import Workplace, environment, tiny_mapping, write_text_files

from hvpflow.files import fingerprint
from hvpflow.pipeline.settings import load_config
from hvpflow.pipeline.steps import settings_digest
from hvpflow.runs.pt_files import load_pt

CHECKPOINTS = ("epoch-001.safetensors", "epoch-004.pt", "final.pt")
MEASURED = ("epoch-001.safetensors", "epoch-004.pt")
CASES = ("seen", "unseen")
ROUNDS = int(os.environ.get("HVPFLOW_FAULT_ROUNDS", "1"))
"""How much longer than in everyday tests to go on."""
SEED = int(os.environ.get("HVPFLOW_FAULT_SEED", "0"))
TIMES = ("seconds", "seconds_this_session", "tokens_per_second", "timing", "checksum")
"""Ends of the keys that may differ between two equal pieces of work."""
TALLY: Counter[str] = Counter()
"""What was tried, by kind; shown at the end of the tests."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of an analysis."""

    name: str
    words: tuple[str, ...]
    stage: str
    """Directory under ``disk`` that it makes or fills."""


def steps_of(directory: Path) -> list[Step]:
    """All commands of the analysis in ``directory``, in the order of their needs."""
    digest = settings_digest(load_config(directory / "config.yaml"))

    def step(name: str, *words: str, stage: str = "results") -> Step:
        return Step(name, (name, "--config", "config.yaml", *words), stage)

    return [
        step("prepare", stage="cache"),
        step("train", stage="run"),
        *(step("inspect", f"--checkpoint={name}") for name in CHECKPOINTS),
        *(
            step("measure", f"--checkpoint={name}", "--case", case, "--settings", digest)
            for name in MEASURED
            for case in CASES
        ),
        *(step("samples", f"--checkpoint={name}", "--case", case) for name in MEASURED for case in CASES),
        step("summary"),
        step("figures"),
    ]


def fault_mapping() -> dict[str, Any]:
    """The smallest run, with everything that is written below ``disk``, so that a small disk can be mounted there."""
    mapping = tiny_mapping()
    mapping["output"] = "disk/results"
    mapping["data"]["cache_dir"] = "disk/cache"
    mapping["runtime"]["output_dir"] = "disk/run"
    mapping["analysis"]["compile_hvp"] = False
    return mapping


class Server:
    """The process that runs the steps; see ``faults_server``."""

    def __init__(self, scratch: Path) -> None:
        self.output = scratch / "output.txt"
        command = [sys.executable, str(Path(__file__).with_name("faults_server.py"))]
        variables = environment(scratch) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=scratch
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(self, directory: Path, words: tuple[str, ...], *, program: str = "steps", **options: Any) -> dict[str, Any]:
        """Run a program in ``directory``; ``status`` of the answer is negative where a signal ended it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"program": program, "words": words, "directory": str(directory), "output": str(self.output)}
        self._process.stdin.write(json.dumps(request | options) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def said(self) -> str:
        """What the last program said."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Bench:
    """One place, always of the same absolute path, in which every trial happens; and what lay there undisturbed."""

    def __init__(self, scratch: Path) -> None:
        self.server = Server(scratch)
        self.place, self.baseline = scratch / "place", scratch / "baseline"
        self.place.mkdir()
        write_text_files(self.place / "text")
        Workplace(self.place).write_config(fault_mapping())
        self.steps = steps_of(self.place)
        self.cpu: dict[Step, float] = {}
        self.operations: dict[Step, int] = {}
        for step in self.steps:
            answer = self.server.run(self.place, step.words, save_seconds=0.0)
            assert answer["status"] == 0, self.server.said()
            self.cpu[step], self.operations[step] = answer["cpu"], answer["operations"]
        self.place.rename(self.baseline)

    def restore(self, before: Step | None = None) -> None:
        """Make the place as it was before ``before``, or after everything."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.baseline, self.place, copy_function=shutil.copy2)
        relink(self.place / "disk" / "run")
        if before is None:
            return
        later = self.steps[self.steps.index(before) :]
        for step in later:
            for path in outputs_of(step, self.place):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if before.name in ("prepare", "train"):
            shutil.rmtree(self.place / "disk" / "results")

    def run(self, step: Step, **options: Any) -> int:
        """Run a step with its progress saved at every opportunity; return its status."""
        return self.server.run(self.place, step.words, save_seconds=0.0, **options)["status"]

    def finish(self, step: Step, context: str) -> None:
        """Repeat the command, which must now succeed."""
        status = self.run(step)
        assert status == 0, f"{context}: {step.words} ended with {status}\n{self.server.said()}"

    def find(self, name: str, index: int = 0) -> Step:
        return [step for step in self.steps if step.name == name][index]

    def refused(self, step: Step, context: str) -> str:
        """Check that the last program ended with one clear message; return it."""
        said = self.server.said()
        assert "Traceback" not in said, f"{context}: {step.words}\n{said}"
        last = said.rstrip().splitlines()[-1]
        assert last.startswith("hvpflow: error: "), f"{context}: {step.words}\n{said}"
        return last

    def check_whole(self, context: str) -> None:
        """Whatever has a final name holds what it holds undisturbed; only logs of a running training may be short."""
        for path in self.files():
            name = path.relative_to(self.place)
            if is_unfinished_log(name) or "logs" in name.parts:
                continue
            expected = self.baseline / name
            found = content(path)  # raises on anything cut short
            if expected.exists() and not is_private(name):
                assert found == content(expected), f"{context}: {name}"

    def check_equal(self, context: str) -> None:
        """Everything is there, nothing else is, and all of it is as undisturbed."""
        self.check_whole(context)
        kinds = (self.place, self.baseline)
        here, there = ({path.relative_to(root) for path in files_below(root)} for root in kinds)
        here, there = ({name for name in names if "logs" not in name.parts} for names in (here, there))
        assert here == there, f"{context}: {sorted(map(str, here ^ there))}"

    def files(self) -> Iterator[Path]:
        return files_below(self.place)


def files_below(root: Path) -> Iterator[Path]:
    """Files under final names: none that is hidden, or below a hidden directory other than a training's own."""
    for path in sorted(root.rglob("*")):
        hidden = [part for part in path.relative_to(root).parts if part.startswith(".") and part != ".training"]
        if path.is_file() and not hidden:
            yield path


def is_private(name: Path) -> bool:
    return ".training" in name.parts or "store" in name.parts


def is_unfinished_log(name: Path) -> bool:
    """Files that grow or change while a training runs, and say so."""
    return name.name in ("run.log", "status.json") or (".training" in name.parts and name.name == "metrics.jsonl")


def outputs_of(step: Step, place: Path) -> list[Path]:
    disk = place / "disk"
    words = dict(word.removeprefix("--").split("=", 1) for word in step.words if "=" in word)
    case = step.words[step.words.index("--case") + 1] if "--case" in step.words else ""
    results = disk / "results"
    match step.name:
        case "prepare":
            return [disk / "cache"]
        case "train":
            return [disk / "run"]
        case "inspect":
            return [results / "inspect" / f"{words['checkpoint']}.json"]
        case "measure":
            records = results.glob(f"work/*/{words['checkpoint']}/{case}/0.json")
            return [*records, *store_contexts(results, words["checkpoint"], case)]
        case "samples":
            return [results / "samples" / f"{words['checkpoint']}.{case}.json"]
        case "summary":
            return [results / "manifest.json", results / "summary.csv"]
    return sorted(results.glob("*.p*"))


def store_contexts(results: Path, checkpoint: str, case: str) -> list[Path]:
    """The store's directories of one (checkpoint, case): those whose ḡ has the norm of its record."""
    (record,) = results.glob(f"work/*/{checkpoint}/{case}/0.json")
    norm = json.loads(record.read_text(encoding="utf-8"))["mean_gradient"]["norm"]
    entries = results.glob("store/*/mean-gradient.json")
    return [path.parent for path in entries if json.loads(path.read_text(encoding="utf-8"))["value"]["norm"] == norm]


def relink(run: Path) -> None:
    """Make published checkpoints links to the private ones again, as training leaves them."""
    for path in run.glob("*.*"):
        twin = run / ".training" / path.name
        if path.suffix in (".pt", ".safetensors") and twin.is_file():
            path.unlink()
            os.link(twin, path)


def content(path: Path) -> Any:
    """What a file says that must be the same in every repetition: everything but times."""
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [without_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".pt":
        state = load_pt(path)
        state = state.get("state", state)
        return hashed({key: value for key, value in state.items() if key != "rng"})
    if path.suffix == ".pdf":
        data = path.read_bytes()
        return data.startswith(b"%PDF") and data.rstrip().endswith(b"%%EOF")
    return path.read_bytes()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not key.endswith(TIMES)}
        return {key: without_times(item) for key, item in kept.items()}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def hashed(value: Any) -> Any:
    """Plain data with tensors replaced by their bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): hashed(item) for key, item in value.items()}
    return [hashed(item) for item in value] if isinstance(value, (list, tuple)) else value


def choices(*labels: object) -> random.Random:
    """A random generator of its own for one trial."""
    return random.Random(fingerprint([SEED, *map(str, labels)]))


Damage = Callable[[bytes, random.Random], bytes]


def flip(data: bytes, choose: random.Random) -> bytes:
    """One to three flipped bits; half of the time near an end, where headers and directories lie."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 3)):
        near = choose.random() < 0.5
        place = choose.randrange(min(600, len(data))) if near else choose.randrange(len(data))
        if near and choose.random() < 0.5:
            place = len(data) - 1 - place
        changed[place] ^= 1 << choose.randrange(8)
    return bytes(changed)


def truncate(data: bytes, choose: random.Random) -> bytes:
    return data[: choose.choice((0, 1, len(data) - 1, choose.randrange(len(data))))]


def overwrite(data: bytes, choose: random.Random) -> bytes:
    """A stretch of zeros, as a disk may leave after a loss of power."""
    start = choose.randrange(len(data))
    return data[:start] + bytes(min(choose.randint(1, 4096), len(data) - start)) + data[start + 4096 :]


DAMAGES: dict[str, Damage] = {"flip": flip, "truncate": truncate, "overwrite": overwrite}
