"""The workflow on a real Slurm: undisturbed, disturbed in every way that clusters know, and interrupted.

Each ends with the numbers of a run that no Slurm had a part in, to the bit.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from slurm_cases import Submission, Worker, find_worker
from workflow_cases import Workplace, scalars, tiny_mapping, write_text_files

pytestmark = pytest.mark.slurm
ONE_MINUTE = ("--default-resources", "nodes=1", "--set-resources", "measure:runtime=attempt")
"""Time limits of one minute a try, without the warning that the profile asks for two minutes earlier."""


def assert_equal_results(directory: Path, undisturbed: Path, cases: str = "*") -> None:
    paths = sorted((undisturbed / "results" / "samples").glob(f"*.{cases}.json"))
    assert [path.name for path in paths] == sorted(path.name for path in directory.iterdir())
    assert len(paths) == (4 if cases == "*" else 2)
    for path in paths:
        assert scalars(directory / path.name) == scalars(path), path.name


def frozen_worker(submission: Submission, log: Path, *words: str) -> Worker:
    """The worker of a job, stopped as soon as it said something: it does not end before it is dealt with."""
    submission.wait_for(lambda: log.is_file() and log.stat().st_size, f"work on {words}")
    worker = find_worker(*words)
    assert worker is not None, f"{words} ended before it could be disturbed:\n{submission.said()}"
    worker.send(signal.SIGSTOP)
    return worker


def test_whole_workflow_trains_and_measures_in_jobs_of_one_gpu(lab, undisturbed, submit, tmp_path):
    """Training is cancelled once, and continues in another job."""
    place = Workplace(tmp_path / "whole")
    write_text_files(place.directory / "text")
    mapping = tiny_mapping()
    mapping["analysis"] |= Workplace(undisturbed).read_config()["analysis"]
    place.write_config(mapping)
    known = {job["JobId"] for job in lab.finished()}
    submission = submit(place)
    submission.wait_for((place.directory / "run" / ".training" / "run.log").exists, "training to begin")
    worker = find_worker("train")
    if worker is not None:
        worker.send(signal.SIGSTOP)
        lab.slurm("scancel", worker.job)
        first = worker.job
    assert submission.end() == 0, submission.said()
    assert_equal_results(place.directory / "results" / "samples", undisturbed)
    for name in ("final.pt", "epoch-001.safetensors"):
        assert (place.directory / "run" / name).is_file()
    if worker is not None:
        assert lab.details(first)["JobState"] == "CANCELLED"
    ended = [job for job in lab.finished() if job["JobId"] not in known]
    measured = [job for job in ended if job["Comment"].startswith("rule_measure")]
    assert len(measured) == 4
    for job in measured:
        assert (job["JobState"], job["NumTasks"], job["TresPerJob"]) == ("COMPLETED", "1", "gres:gpu:1")
        assert job["TimeLimit"] == "00:10:00"


def test_disturbed_jobs_are_tried_again_to_the_same_numbers(lab, undisturbed, trained, submit):
    """One job cancelled, one killed, one beyond its time limit, one told to go: all in one analysis."""
    logs = trained.directory / "results" / "logs" / "measure"
    known = {job["JobId"] for job in lab.finished()}
    submission = submit(trained, *ONE_MINUTE)
    cases = [(name, case) for name in ("epoch-001.safetensors", "final.pt") for case in ("seen", "unseen")]
    cancelled, killed, too_long, told = (
        frozen_worker(submission, logs / f"{name}.{case}.0.log", f"--checkpoint={name}", case) for name, case in cases
    )
    lab.slurm("scancel", cancelled.job)
    killed.send(signal.SIGKILL)
    told.send(signal.SIGTERM)
    told.send(signal.SIGCONT)
    assert submission.end() == 0, submission.said()
    assert_equal_results(trained.directory / "results" / "samples", undisturbed)
    ends = {worker.job: lab.details(worker.job)["JobState"] for worker in (cancelled, killed, too_long, told)}
    assert list(ends.values()) == ["CANCELLED", "FAILED", "TIMEOUT", "FAILED"]
    again = [job for job in lab.finished() if job["JobId"] not in known | set(ends)]
    assert [job["JobState"] for job in again] == ["COMPLETED"] * 4
    first = lab.details(cancelled.job)
    assert {job["TimeLimit"] for job in again} == {"00:02:00"} and first["TimeLimit"] == "00:01:00"
    assert {job["MinMemoryNode"] for job in again} == {f"{2 * int(first['MinMemoryNode'][:-1])}M"}


def test_interrupted_submission_cancels_its_jobs_and_the_command_repeated_continues(lab, undisturbed, trained, submit):
    """Through `hvpflow submit-analysis`; the second time on a site that knows GPUs by --gres alone."""
    output = trained.directory / "submitted"
    command = [
        *(sys.executable, "-m", "hvpflow.cli", "submit-analysis", "--run", "run", "--output", str(output)),
        *("--checkpoints", "epoch-001.safetensors", "final.pt", "--cache-dir", "cache", "--device", "auto"),
        *("--noise-samples", "3", "--random-samples", "2", "--directions-per-pass", "4", "--jobs", "4"),
        *("--data-case", "seen", "--"),
        *("--slurm-init-seconds-before-status-checks", "3", "--set-threads", "measure=1"),
    ]
    submission = submit(trained, command=command)
    frozen_worker(
        submission,
        output / "logs" / "measure" / "epoch-001.safetensors.seen.0.log",
        "--checkpoint=epoch-001.safetensors",
        "seen",
    )
    submission.interrupt()
    assert submission.end() != 0
    assert "Traceback" not in submission.said()
    assert not (output / "summary.csv").exists()
    lab.wait_until_idle()
    known = {job["JobId"] for job in lab.finished()}
    by_gres = ["--set-resources", "measure:gpu=0", "measure:gres='gpu:1'"]
    repeated = submit(trained, command=[*command, *by_gres])
    assert repeated.end() == 0, repeated.said()
    assert_equal_results(output / "samples", undisturbed, "seen")
    assert (output / "summary.csv").is_file()
    again = [job for job in lab.finished() if job["JobId"] not in known]
    assert {(job["TresPerNode"], job.get("TresPerJob")) for job in again} == {("gres:gpu:1", None)}


def test_failed_job_stops_no_other_and_is_named_with_the_end_of_its_log(lab, undisturbed, trained, submit):
    trained.change("analysis", data_case="seen")
    log = trained.directory / "results" / "logs" / "measure" / "final.pt.seen.0.log"
    submission = submit(trained, "--retries", "0")
    frozen_worker(submission, log, "--checkpoint=final.pt", "seen").send(signal.SIGKILL)
    assert submission.end() != 0
    said = submission.said()
    report = said[said.index("1 job did not finish:") :].splitlines()
    assert report[1] == "  measure final.pt seen 0: results/logs/measure/final.pt.seen.0.log"
    last = log.read_text(encoding="utf-8").splitlines()[-1]
    assert f"    | {last}" in report[2:8]
    assert len(list((trained.directory / "results" / "samples").iterdir())) == 1
    repeated = submit(trained)
    assert repeated.end() == 0, repeated.said()
    assert_equal_results(trained.directory / "results" / "samples", undisturbed, "seen")
