"""What a cluster is asked for: time from work and rate, the rate from earlier jobs; and what is said of failed jobs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from workflow_cases import Workplace

from hvpflow.errors import HvpflowError
from hvpflow.files import read_json, write_json
from hvpflow.models.config import LlamaConfig
from hvpflow.pipeline import estimate as estimates
from hvpflow.pipeline.estimate import (
    ASSUMED_RATES,
    Estimate,
    direction_counts,
    epoch_tokens,
    measure_estimate,
    training_estimate,
    work_of_a_token,
)
from hvpflow.pipeline.failures import failure_report, jobs_of
from hvpflow.pipeline.plan import Plan, make_plan
from hvpflow.pipeline.settings import config_from_mapping
from hvpflow.pipeline.steps import threads_of
from hvpflow.pipeline.submit import find_profile, pending_lines, submitted_settings


def planned(**analysis: object) -> Plan:
    """The plan of the 20M recipe, of which nothing exists."""
    settings = {"checkpoints": ["final.pt"], "device": "cuda", **analysis}
    return make_plan(
        config_from_mapping({"recipe": "20m", "run": "no/run", "output": "no/output", "analysis": settings})
    )


def test_work_is_tokens_times_directions_times_parameters_and_attention():
    plan = planned(noise_samples=16, random_samples=8)
    model = plan.recipe.model
    per_token = model.num_parameters + 2 * model.layers * model.width * model.context_length
    assert work_of_a_token(model) == per_token
    expected = epoch_tokens(plan.recipe) * (16 + 8 + 1) * per_token / ASSUMED_RATES["cuda"]
    assert measure_estimate(plan).seconds == pytest.approx(expected + estimates.START_SECONDS)


def test_epoch_and_directions_are_those_that_are_measured(workplace: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace.directory)
    plan = make_plan(config_from_mapping(workplace.read_config()))
    record = read_json(plan.measure_path(plan.aliases[0].measured, "seen", 0))
    assert epoch_tokens(plan.recipe) == record["data"]["tokens"]
    assert direction_counts(plan) == (len(record["noise"]), len(record["random"]), 0)


def test_limits_grow_with_each_try_up_to_the_site_limit():
    estimate = Estimate(seconds=3000.0, slowest_seconds=4000.0, memory_mb=5000, measured_jobs=0)
    assert [estimate.minutes(attempt) for attempt in (1, 2, 3)] == [100, 200, 300]
    assert [estimate.minutes(attempt, 150) for attempt in (1, 2)] == [100, 150]
    assert [estimate.megabytes(attempt) for attempt in (1, 2)] == [5000, 10000]
    assert replace(estimate, slowest_seconds=1.0).minutes() == estimates.MIN_MINUTES


def test_shards_and_the_slower_engine_count():
    whole, engine = measure_estimate(planned()), measure_estimate(planned(engine="jvp-of-grad"))
    start = estimates.START_SECONDS
    assert engine.seconds - start == pytest.approx(estimates.SLOWER_ENGINE * (whole.seconds - start))
    assert measure_estimate(planned(shards=4)).seconds < whole.seconds / 3


def test_after_a_pilot_the_rate_is_that_of_finished_jobs(workplace: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace.directory)
    config = config_from_mapping(workplace.read_config())
    plan = make_plan(config)
    paths = [plan.measure_path(*job) for job in plan.measurements]
    for seconds, path in zip((100.0, 200.0, 300.0, 1000.0), paths, strict=True):
        record = read_json(path)
        record["timing"]["total_seconds"] = seconds
        write_json(path, record)
    estimates._finished.cache_clear()
    threads = read_json(paths[0])["policy"]["threads"]
    found = measure_estimate(plan, threads=threads)
    assert found.measured_jobs == 4
    assert found.slowest_seconds == pytest.approx(1000 + estimates.START_SECONDS)
    # The median is taken of rates: of the two in the middle, 1/200 and 1/300, it is 1/240.
    assert found.seconds == pytest.approx(240 + estimates.START_SECONDS)
    assert found.minutes() == 27
    other = make_plan(
        config_from_mapping(workplace.read_config() | {"analysis": {"dtype": "float64", "device": "cpu"}})
    )
    assert measure_estimate(other).measured_jobs == 0
    paths[0].write_text("{", encoding="utf-8")
    estimates._finished.cache_clear()
    assert measure_estimate(plan, threads=threads).measured_jobs == 3


def test_training_goes_on_at_its_own_rate(tmp_path: Path):
    plan = replace(planned(), run_directory=tmp_path)
    sampling = plan.recipe.sampling()
    tokens = sampling.boundaries()[-1] * sampling.context_length
    assumed = training_estimate(plan)
    assert assumed.measured_jobs == 0
    (tmp_path / ".training").mkdir()
    rows = [{"tokens_per_second": 1e5}, {"tokens_per_second": 2e5}, {"validation_loss": 3.0}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"tokens_per_sec'
    (tmp_path / ".training" / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert training_estimate(plan).seconds == pytest.approx(tokens / 2e5 + estimates.START_SECONDS)


def test_planning_an_estimate_imports_no_torch():
    code = "import sys, hvpflow.pipeline.estimate, hvpflow.pipeline.failures; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas"} & set(done.stdout.split())


def test_cluster_defaults_are_for_cuda_alone_and_give_way():
    assert submitted_settings({}) == {"device": "cuda", "amp": True, "hvp_batch_size": 64}
    assert submitted_settings({"amp": False, "hvp_batch_size": 8}) == {
        "device": "cuda",
        "amp": False,
        "hvp_batch_size": 8,
    }
    assert submitted_settings({"device": "cpu"}) == {"device": "cpu"}
    assert submitted_settings({"dtype": "float64"}) == {"device": "cuda", "dtype": "float64", "hvp_batch_size": 64}


def test_pending_measurements_are_listed_with_their_gpu_time():
    lines = pending_lines(planned())
    assert [line.split()[:3] for line in lines[2:4]] == [["final.pt", "seen", "0"], ["final.pt", "unseen", "0"]]
    assert lines[-1].startswith("2 jobs pending, together about 9.") and "of one GPU" in lines[-1]


def test_profile_is_a_directory_or_a_shipped_name(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("executor: slurm\n", encoding="utf-8")
    assert find_profile(str(tmp_path)) == tmp_path
    assert (find_profile("slurm") / "config.yaml").is_file()
    with pytest.raises(HvpflowError, match="did you mean 'slurm'"):
        find_profile("slurmm")


def test_failed_jobs_are_named_with_the_end_of_their_logs(workplace: Workplace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workplace.directory)
    plan = make_plan(config_from_mapping(workplace.read_config()))
    assert failure_report(plan, since=0.0, scheduler_logs=Path("none")) == []
    failed = [job for job in jobs_of(plan) if job.rule == "measure"][:2]
    for job in failed:
        job.outputs[0].unlink()
        job.log.write_text("".join(f"line {number}\n" for number in range(9)), encoding="utf-8")
    slurm_log = Path("logs") / "rule_measure" / failed[0].detail.replace(" ", "_") / "7.log"
    slurm_log.parent.mkdir(parents=True)
    slurm_log.write_text("noise\nslurmstepd: error: *** JOB 7 CANCELLED DUE TO TIME LIMIT ***\n", encoding="utf-8")
    lines = failure_report(plan, since=0.0, scheduler_logs=Path("logs"))
    assert lines[1] == "2 jobs did not finish:"
    assert lines[2] == f"  measure {failed[0].detail}: {failed[0].log}"
    assert lines[3:9] == [f"    | line {n}" for n in range(4, 9)] + [
        "    | slurmstepd: error: *** JOB 7 CANCELLED DUE TO TIME LIMIT ***"
    ]
    assert failure_report(plan, since=1e12, scheduler_logs=Path("logs")) == []


def test_attention_is_no_part_of_the_parameters():
    short = LlamaConfig(vocab_size=100, layers=2, width=8, heads=2, ffn_width=16, context_length=4)
    long = replace(short, context_length=8)
    assert work_of_a_token(long) - work_of_a_token(short) == 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("alone", "variables", "expected"),
    [
        (False, {"SLURM_CPUS_PER_TASK": "8"}, 3),
        (True, {}, 5),
        (True, {"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "16"}, 8),
        (True, {"SLURM_CPUS_ON_NODE": "16"}, 16),
    ],
)
def test_threads_are_those_granted(
    monkeypatch: pytest.MonkeyPatch, alone: bool, variables: dict[str, str], expected: int
):
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = argparse.Namespace(alone=alone, threads=3)
    assert threads_of(planned(cpu_threads=5).config, arguments) == expected
