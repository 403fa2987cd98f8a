# Validated settings, the plan made from them, and what several rules share.
import contextlib
import os
import sys

from snakemake.exceptions import WorkflowError
from snakemake.utils import validate

from hvpflow.errors import HvpflowError
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
STEP = f"{sys.executable} -m hvpflow.pipeline.steps"


wildcard_constraints:
    checkpoint=r"epoch-\d+\.(safetensors|pt)|final\.pt",
    case="seen|unseen",
    shard=r"\d+",


CORES = workflow.resource_settings.cores or 1


def granted_threads():
    """CPUs of one worker: all there are, or an equal part where several GPUs are worked at once."""
    gpus = workflow.resource_settings.resources.get("gpu").value or 1
    return max(1, CORES // gpus)


# With one core (``-j1``) a worker has the machine to itself and sets its threads from ``analysis.cpu_threads``.
ALONE = "--alone" if CORES == 1 else ""
