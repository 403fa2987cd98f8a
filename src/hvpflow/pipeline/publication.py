"""What an analysis publishes: manifest, summary and figures, from the samples and inspect records on disk."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hvpflow import __version__
from hvpflow.errors import HvpflowError
from hvpflow.files import read_record, sha256_file, write_record
from hvpflow.pipeline.plan import Plan, inspected
from hvpflow.pipeline.settings import Config
from hvpflow.report.figures import draw_figures
from hvpflow.report.manifest import build_manifest
from hvpflow.report.summary import read_rows, summary_rows, write_summary
from hvpflow.report.training_norms import read_training_norms
from hvpflow.typed import to_mapping


def publish_summary(plan: Plan) -> None:
    """Write ``manifest.json`` and ``summary.csv`` from every samples file of the plan.

    Raises:
        HvpflowError: a samples or inspect record is missing, damaged, or of other settings.
    """
    paths = [plan.samples_path(alias.measured, case) for alias in plan.aliases for case in plan.cases]
    samples = {str(path.relative_to(plan.output)): read_record(path) for path in paths}
    records = [record for name in plan.checkpoints if (record := inspected(plan, name)) is not None]
    training = plan.recipe.training
    manifest = build_manifest(
        run=os.path.abspath(plan.run_directory),
        options=to_mapping(plan.config.analysis),
        settings_digest=plan.digest,
        inspect_records=records,
        samples=samples,
        environment=environment(),
        micro_batch_size=training.micro_batch_size,
        hvp_batch_size=plan.config.analysis.hvp_batch_size or training.micro_batch_size,
        effective_batch_tokens=training.batch_tokens,
    )
    write_summary(summary_rows(manifest, samples), plan.output / "summary.csv")
    manifest["summary_sha256"] = sha256_file(plan.output / "summary.csv")
    write_record(plan.output / "manifest.json", manifest)


def draw(config: Config, output: Path, *, training_norms: bool) -> list[Path]:
    """Draw the figures of a published summary; return their paths.

    Raises:
        HvpflowError: nothing is published yet, or training logged no norms where they are asked for.
    """
    manifest = output / "manifest.json"
    if not manifest.is_file():
        raise HvpflowError(
            f"{output} has no manifest.json yet: finish the analysis first (hvpflow status says how far it is)"
        )
    norms = read_training_norms(config.run_directory) if training_norms else None
    return draw_figures(read_rows(manifest), output, training_norms=norms)


def environment() -> dict[str, Any]:
    """Software and machine of a publication."""
    return {
        "hvpflow": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
