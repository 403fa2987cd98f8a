"""Training a run from its recipe, and the loss of any of its checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hvpflow.data.cache import TokenCache
from hvpflow.data.epochs import training_stream
from hvpflow.devices import choose_device
from hvpflow.errors import HvpflowError
from hvpflow.files import write_json, write_text
from hvpflow.interruption import Interrupted, stop_on_signal
from hvpflow.models.llama import Llama
from hvpflow.runs.checkpoints import read_checkpoint
from hvpflow.runs.pt_files import load_pt
from hvpflow.runs.recipe import Recipe, check_cache_matches, load_recipe, recipe_identity, retained_files
from hvpflow.runs.run import Run
from hvpflow.runs.safetensors_files import read_safetensors
from hvpflow.training.loop import Trainer
from hvpflow.training.metrics import MetricsLog, environment, evaluation_metrics
from hvpflow.training.schedule import make_schedule
from hvpflow.training.states import loader_record, make_learner, make_saver, resume
from hvpflow.training.validation import validate, validation_complete, validation_subset
from hvpflow.training.workspace import ROLLING_STATE, Workspace, claim


def train_run(
    recipe: Recipe, cache: TokenCache, directory: Path, *, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Train ``recipe`` on ``cache`` and publish what it retains in ``directory``; or finish what was begun there.

    A finished training of the same recipe returns at once; an interrupted one continues, on a CPU with as many threads
    to the same bits as without interruption. A run of another recipe is moved aside, not deleted.

    Args:
        recipe: what to train; where its revisions are "main", the published ``resolved.yaml`` names the cache's.
        cache: a token cache that matches it.
        directory: the run directory, created where missing.
        progress: called with one line of text now and then.

    Raises:
        Interrupted: SIGTERM or SIGINT came; the state is saved, and repeating the call continues.
        HvpflowError: the cache does not match or is too small, the device is absent, the directory is in use, or the
            training diverged.
    """
    check_cache_matches(recipe, cache)
    device = choose_device(recipe.runtime.device)
    recipe = resolved(recipe, cache, device)
    _check_feasible(recipe, cache)
    retained = retained_files(recipe)
    with claim(directory, recipe_identity(recipe, cache.identity), progress) as workspace:
        path = workspace.path("resolved.yaml")
        if workspace.is_complete(retained):
            _forget_damaged(recipe, workspace, retained, progress)
        if not workspace.is_complete(retained):
            write_text(path, recipe.to_yaml())
            with _run_log(workspace.path("run.log"), progress) as log:
                _train(recipe, cache, workspace, retained, device, log)
        else:
            progress(f"{directory} is trained already")
            if load_recipe(path).training != recipe.training:  # what to retain is no part of the identity
                write_text(path, recipe.to_yaml())
        workspace.publish(retained)


def evaluate_checkpoint(
    run: Run, name: str, cache: TokenCache, *, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Loss of checkpoint ``name`` on the whole validation split; of a packed run, that of the averaged model.

    Returns:
        ``loss`` (mean cross-entropy per token in nats), ``perplexity``, ``tokens`` (targets counted), ``seconds``,
        ``split``, ``validation_complete``, and the checkpoint's name, epoch, step and training tokens.
    """
    check_cache_matches(run.recipe, cache)
    cache.verify()
    checkpoint = read_checkpoint(run, name, workers=False)
    device = choose_device(str(device))
    model = Llama(run.recipe.model)
    model.load_state_dict(checkpoint.weights)
    began = time.perf_counter()
    loss, tokens = validate(model.to(device), run.recipe, cache, subset=False, device=device)
    metrics = evaluation_metrics(loss, tokens, time.perf_counter() - began, "full", validation_complete(cache))
    position = {"epoch": checkpoint.epoch, "step": checkpoint.step, "training_tokens": checkpoint.tokens}
    return {"checkpoint": name, **metrics, **position}


def resolved(recipe: Recipe, cache: TokenCache, device: torch.device) -> Recipe:
    """The recipe with the revisions that the cache was really made from, and without ``auto``."""
    manifest, runtime = cache.manifest, recipe.runtime
    data = replace(
        recipe.data, revision=manifest["dataset_revision"], tokenizer_revision=manifest["tokenizer_revision"]
    )
    if runtime.device == "auto":
        runtime = replace(runtime, device="cuda:0" if device == torch.device("cuda") else str(device))
    if runtime.cpu_threads == "auto":
        runtime = replace(runtime, cpu_threads=torch.get_num_threads())
    return replace(recipe, data=data, runtime=runtime)


def _check_feasible(recipe: Recipe, cache: TokenCache) -> None:
    """Refuse what cannot be trained, before an older run is touched."""
    sampling = recipe.sampling()
    stream = training_stream(sampling, cache.split("train"))
    make_schedule(recipe, len(stream) // sampling.batch_blocks)
    split, settings = cache.split("validation"), recipe.evaluation
    validation_subset(split, recipe.model.context_length, settings.subset_blocks, settings.seed)


def _forget_damaged(recipe: Recipe, workspace: Workspace, retained: list[str], progress: Callable[[str], None]) -> None:
    """Remove private checkpoints that are to be published again but are damaged, so that they are trained again.

    A published file is a link to the private one: whatever damages it damages both, and deleting it mends neither.
    """
    for name in retained:
        path = workspace.path(name)
        if (workspace.run_directory / name).exists() or not path.is_file():
            continue
        try:
            if path.suffix == ".safetensors":
                read_safetensors(path, recipe.model.parameter_shapes())
            else:
                load_pt(path)
        except HvpflowError as error:
            progress(f"{name} is trained again: {error}")
            path.unlink()


def _train(
    recipe: Recipe,
    cache: TokenCache,
    workspace: Workspace,
    retained: list[str],
    device: torch.device,
    progress: Callable[[str], None],
) -> None:
    for setting in _without_effect(recipe, device):
        progress(f"{setting} has no effect here")
    cache.verify()
    learner = make_learner(recipe, device)
    position = resume(recipe, workspace, learner, retained, progress)
    rows = MetricsLog(workspace.path("metrics.jsonl")).rewind(position.step, position.completed_epochs)
    position.training_seconds = position.interval.seconds + sum(row.get("training_seconds", 0.0) for row in rows)
    loader = loader_record(recipe, cache)
    record = environment(device) | {
        "loader": loader,
        "parameters": recipe.num_parameters,
        "recipe_identity": workspace.identity,
    }
    write_json(workspace.path("environment.json"), record)
    saver = make_saver(recipe, workspace, learner, loader, retained)
    with stop_on_signal() as stop, _deterministic(recipe):
        trainer = Trainer(
            *(recipe, cache, learner, saver, workspace.directory),
            device=device,
            stop=stop,
            progress=progress,
            position=position,
        )
        try:
            result = trainer.run()
        except torch.OutOfMemoryError as error:
            also = ", with training.batch_tokens in proportion," if recipe.decentralized else ""
            message = (
                f"{device} ran out of memory at step {trainer.position.step + 1}: lower training.micro_batch_size "
                f"(now {recipe.training.micro_batch_size} sequences){also} or evaluation.batch_size"
            )
            workspace.write_status(_status("failed", trainer) | {"message": message})
            raise HvpflowError(message) from error
        except Interrupted:
            workspace.write_status(_status("interrupted", trainer))
            raise
        except Exception as error:
            workspace.write_status(_status("failed", trainer) | {"message": str(error)})
            raise
    result |= {"recipe_identity": workspace.identity, **learner.result()}
    workspace.write_status(_status("complete", trainer))
    write_json(workspace.path("result.json"), result)
    missing = workspace.missing(retained)
    if missing:
        raise AssertionError(f"the training ended without writing {', '.join(missing)}")
    workspace.path(ROLLING_STATE).unlink(missing_ok=True)


def _without_effect(recipe: Recipe, device: torch.device) -> list[str]:
    """Settings that ask for something that this training does not do."""
    runtime = recipe.runtime
    settings = [
        (f"runtime.sdpa_backend: {runtime.sdpa_backend}", runtime.sdpa_backend != "auto"),
        (f"runtime.attention_backend: {runtime.attention_backend}", runtime.attention_backend != "sdpa"),
    ]
    if device.type != "cuda":
        settings += [
            ("runtime.amp on a CPU", runtime.amp),
            ("runtime.compile on a CPU", runtime.compile),
            ("runtime.fused_optimizer on a CPU", runtime.fused_optimizer),
        ]
    return [text for text, asked in settings if asked]


def _status(status: str, trainer: Trainer) -> dict[str, Any]:
    position = trainer.position
    return {
        "status": status,
        "step": position.step,
        "steps": trainer.num_steps,
        "completed_epochs": position.completed_epochs,
        "epochs": trainer.recipe.num_epochs,
    }


@contextlib.contextmanager
def _run_log(path: Path, progress: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Pass lines on to ``progress`` and append them, with the time, to the run's log."""
    with path.open("a", encoding="utf-8") as handle:

        def write(line: str) -> None:
            # A full disk must not end a training whose states may still find room elsewhere in time.
            with contextlib.suppress(OSError):
                handle.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
                handle.flush()

        def log(line: str) -> None:
            write(line)
            progress(line)

        try:
            yield log
        except Exception as error:
            write(f"{type(error).__name__}: {error}")
            raise


@contextlib.contextmanager
def _deterministic(recipe: Recipe) -> Iterator[None]:
    """Use deterministic kernels only, where the recipe asks for them."""
    before = torch.are_deterministic_algorithms_enabled()
    if recipe.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(recipe.runtime.deterministic or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
