"""What text a configured run needs, as a request to the data preparation."""

from __future__ import annotations

from hvpflow.data.epochs import required_train_tokens
from hvpflow.data.prepare import PrepareRequest
from hvpflow.errors import HvpflowError
from hvpflow.files import fingerprint
from hvpflow.pipeline.settings import Config
from hvpflow.runs.recipe import Recipe, recipe_identity

STDLIB = "python-stdlib"
VALIDATION_FRACTION = 0.05
"""Default size of the validation split, as a part of the training tokens."""
MAX_VALIDATION_TOKENS = 4_000_000


def preparation_request(config: Config) -> PrepareRequest:
    """The token cache that the configured run needs: its training budget and one unseen epoch, at the least.

    Raises:
        HvpflowError: the configuration trains no run, or ``data.prepare_train_tokens`` is below what the run needs.
    """
    recipe = trained_recipe(config)
    data = recipe.data
    if (config.corpus.source == STDLIB) != (data.dataset == STDLIB):
        raise HvpflowError(
            f"data.dataset is {data.dataset!r}, but corpus.source is {config.corpus.source!r}: the name {STDLIB} is "
            "for that source alone. Set corpus.source to files or huggingface, or give the dataset its name"
        )
    needed = required_train_tokens(recipe.sampling(), data.shard_tokens)
    if data.prepare_train_tokens is not None and data.prepare_train_tokens < needed:
        raise HvpflowError(
            f"data.prepare_train_tokens is {data.prepare_train_tokens:,}, but training and one unseen epoch need "
            f"{needed:,} tokens; raise it, or remove it to have as many prepared"
        )
    train_tokens = max(needed, data.prepare_train_tokens or 0)
    subset_tokens = recipe.evaluation.subset_blocks * recipe.model.context_length + 1
    default_validation = max(subset_tokens, min(int(train_tokens * VALIDATION_FRACTION), MAX_VALIDATION_TOKENS))
    return PrepareRequest(
        dataset=data.dataset,
        revision=data.revision,
        tokenizer=data.tokenizer,
        tokenizer_revision=data.tokenizer_revision,
        vocab_size=recipe.model.vocab_size,
        corpus=config.corpus,
        shuffle_seed=data.shuffle_seed,
        shuffle_buffer=data.shuffle_buffer,
        shard_tokens=data.shard_tokens,
        tokenize_batch_size=data.tokenize_batch_size,
        train_tokens=train_tokens,
        validation_tokens=data.prepare_validation_tokens or default_validation,
    )


def trained_recipe(config: Config) -> Recipe:
    """The recipe that the configuration trains.

    Raises:
        HvpflowError: the configuration analyses an existing run.
    """
    if config.training_recipe is None:
        raise HvpflowError("this configuration only analyses an existing run; give a recipe to prepare or train one")
    return config.training_recipe


def recipe_digest(recipe: Recipe) -> str:
    """Digest of what training's declared files depend on: the recipe, and which checkpoints it retains."""
    training = recipe.training
    retention = [training.checkpoint_policy, list(training.checkpoint_epochs), training.save_epoch_training_state]
    return fingerprint({"recipe": recipe_identity(recipe, ""), "retention": retention})[:16]
