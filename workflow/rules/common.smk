# Validated settings, the plan made from them, and what several rules share.
import contextlib
import os
import sys
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from hvpflow.errors import HvpflowError
from hvpflow.pipeline.estimate import measure_estimate, training_estimate
from hvpflow.pipeline.failures import failure_report
from hvpflow.pipeline.holding import hold_while_running
from hvpflow.pipeline.launch import LAUNCHED
from hvpflow.pipeline.output import CONFIG_NAME, claim_output, closing_words
from hvpflow.pipeline.plan import make_plan
from hvpflow.pipeline.settings import config_from_mapping


@contextlib.contextmanager
def said_by_workflow():
    """Say a user's mistake in Snakemake's way: the message alone, without a traceback."""
    try:
        yield
    except HvpflowError as error:
        raise WorkflowError(str(error)) from None


with said_by_workflow():
    settings = config_from_mapping(config)
    # The schema says the same to editors and readers of the file; our own check comes first for its better messages.
    validate(settings.to_mapping(), "../schemas/config.schema.yaml", set_default=False)
    plan = make_plan(settings)

# The merged configuration, written when work starts, so that every command of the log can be repeated by hand.
CONFIG = plan.output / CONFIG_NAME
SUMMARY = [plan.output / "manifest.json", plan.output / "summary.csv"]
LOGS = plan.output / "logs"
STARTED = time.time()
SCHEDULER_LOGS = Path(".snakemake") / "slurm_logs"
STEP = f"{sys.executable} -m hvpflow.pipeline.steps"


wildcard_constraints:
    checkpoint=r"epoch-\d+\.(safetensors|pt)|final\.pt",
    case="seen|unseen",
    shard=r"\d+",


CORES = workflow.resource_settings.cores or 1
# Snakemake is told its cores unless it submits to a cluster, whose jobs read this file again.
ON_CLUSTER = workflow.resource_settings.cores is None or workflow.remote_exec


def granted_threads():
    """CPUs of one worker: all there are, or an equal part where several GPUs are worked at once.

    A cluster job has one, unless ``set-threads`` says more: the machine that submits it is not the one that runs it.
    """
    if ON_CLUSTER:
        return 1
    gpus = workflow.resource_settings.resources.get("gpu").value or 1
    return max(1, CORES // gpus)


# With one core (``-j1``) a worker has the machine to itself and sets its threads from ``analysis.cpu_threads``.
ALONE = "--alone" if CORES == 1 and not ON_CLUSTER else ""


def max_runtime():
    """Minutes that a job may ask for at most: the profile's default resource ``max_runtime``, or None."""
    given = workflow.resource_settings.default_resources or {}
    limit = given.get("max_runtime")
    limit = getattr(limit, "value", limit)
    return None if limit is None else int(limit)


def estimated(estimate):
    """Resources ``runtime`` (minutes) and ``mem_mb`` of a rule, from an estimate; both grow with each try.

    Only schedulers of clusters use them. On one machine they ask for nothing.
    """

    def runtime(wildcards, threads, attempt):
        return estimate(plan, threads=threads).minutes(attempt, max_runtime())

    def mem_mb(wildcards, threads, attempt):
        return estimate(plan, threads=threads).megabytes(attempt)

    return {"runtime": runtime, "mem_mb": mem_mb}
