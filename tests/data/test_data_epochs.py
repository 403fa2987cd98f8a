"""Epoch boundaries, the seen and unseen epochs, sampled batches, and how much text they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvpflow.data import epochs
from hvpflow.data.cache import Split, TokenCache
from hvpflow.data.epochs import (
    Sampling,
    analysis_epoch,
    check_random_streams,
    choose_noise_samples,
    required_train_tokens,
    training_stream,
)
from hvpflow.errors import HvpflowError

TOY: dict[str, Any] = {
    "context_length": 64,
    "batch_tokens": 704,
    "microbatch_size": 4,
    "num_parameters": 70896,
    "tokens_per_parameters": 1.0,
    "epoch_tokens_per_parameters": 0.25,
    "seed": 42,
    "loader_version": 2,
    "shuffle_group_size": 2,
}
OLD = {"loader_version": 1, "buffer_size_mib": 0.0122, "shuffle_group_size": None}
PACKED = OLD | {"batch_tokens": 768, "microbatch_size": 3, "num_workers": 4}


def toy(**changes: Any) -> Sampling:
    return Sampling(**(TOY | changes))


def sized_cache(tokens: int, shard_tokens: int) -> TokenCache:
    """A cache of that many tokens, without a file: epochs look at sizes only."""
    offsets = np.array([*range(0, tokens, shard_tokens), tokens], dtype=np.int64)
    split = Split(name="train", files=(), sha256=(), shard_offsets=offsets, shard_tokens=shard_tokens)
    return TokenCache(
        directory=Path("sized"), manifest={}, identity="x", vocab_size=2, eos_token_id=0, splits={"train": split}
    )


def test_golden_boundaries() -> None:
    assert toy().boundaries() == (275, 550, 836, 1111)
    assert toy(**PACKED).boundaries() == (276, 552, 828, 1104)


def test_boundaries_are_exact_decimals() -> None:
    # In floats 0.3 / 0.1 is no whole number; as decimals it is 3.
    assert len(toy(tokens_per_parameters=0.3, epoch_tokens_per_parameters=0.1).boundaries()) == 3
    # floor(k E + 1/2) at exact halves: E = 2.5 batches.
    exact = toy(
        num_parameters=10,
        batch_tokens=64,
        microbatch_size=1,
        tokens_per_parameters=64.0,
        epoch_tokens_per_parameters=16,
    )
    assert exact.boundaries() == (3, 5, 8, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_parameters": 1.1}, "whole multiple"),
        ({"tokens_per_parameters": 0.0}, "whole multiple"),
        ({"epoch_tokens_per_parameters": 0.001}, "epoch 1 is shorter than a batch"),
        # Epochs of half a batch: 1/2 + 1/2 rounds up to 1, and 1 + 1/2 down to 1.
        ({"batch_tokens": 35456, "num_parameters": 70912}, "epoch 2 is shorter"),
        ({"batch_tokens": 700}, "multiple of model.context_length"),
        ({"microbatch_size": 12}, "more than the 11 sequences"),
        ({"num_workers": 4}, "packed workers take 4 x 4"),
        ({"shuffle_group_size": 0}, "shuffle_group_size is 0"),
        ({"shuffle_group_size": None}, "shuffle_group_size is None"),
        (OLD | {"buffer_size_mib": 1e-5}, "too little for one sequence"),
        ({"seed": -1}, "seed is -1"),
        ({"num_parameters": 0}, "num_parameters is 0"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HvpflowError, match=message):
        toy(**changes)


def test_golden_noise_samples() -> None:
    assert choose_noise_samples(25, 8, 42).tolist() == [0, 5, 7, 14, 17, 18, 19, 22]
    assert choose_noise_samples(92, 8, 42).tolist() == [0, 23, 33, 64, 70, 72, 79, 88]
    assert choose_noise_samples(5, 8, 42).tolist() == [0, 1, 2, 3, 4]
    assert choose_noise_samples(5, "all", 42).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(HvpflowError, match="at least 1"):
        choose_noise_samples(5, 0, 42)


def test_changed_random_streams_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_random_streams()
    monkeypatch.setattr(epochs, "random_stream", lambda *entropy: np.random.Generator(np.random.MT19937(list(entropy))))
    with pytest.raises(HvpflowError, match="other random numbers"):
        check_random_streams()


@pytest.mark.parametrize("run", ["ordinary-new", "ordinary-old", "packed-old"])
def test_reference_epochs_and_batches(reference: Path, run: str) -> None:
    recipe = yaml.safe_load((reference / "runs" / run / "resolved.yaml").read_text())
    sampling = toy(
        batch_tokens=recipe["training"]["batch_tokens"],
        microbatch_size=recipe["training"]["micro_batch_size"],
        num_workers=recipe["decentralized"]["num_models"] if recipe["decentralized"] else 1,
        loader_version=2 if "shuffle_group_size" in recipe["data"] else 1,
        buffer_size_mib=recipe["data"].get("buffer_size_mib"),
        shuffle_group_size=recipe["data"].get("shuffle_group_size"),
    )
    cache = TokenCache.open(reference / "data" / "stdlib-512")
    results = reference / "results" / f"{run}-float64"
    manifest = json.loads((results / "manifest.json").read_text())
    assert [entry["case"] for entry in manifest["data"]] == ["seen", "unseen"]
    for entry in manifest["data"]:
        epoch = analysis_epoch(sampling, cache, entry["case"])
        assert json.dumps(epoch.identity) == json.dumps(entry)
        assert epoch.num_tokens == entry["tokens"]
        chosen = choose_noise_samples(epoch.num_noise_samples, 8, 42).tolist()
        for path in results.glob(f"*-{entry['case']}.json"):
            noise = json.loads(path.read_text())["noise"]
            assert [sample["batch_index"] for sample in noise] == chosen
            assert [sample["batch"] for sample in noise] == [epoch.sample_batch(index) for index in chosen]


def test_samples_partition_the_epoch() -> None:
    epoch = analysis_epoch(toy(**PACKED), sized_cache(200001, 10007), "seen")
    assert epoch.num_noise_samples == 92
    rows = [epoch.sample_blocks(index) for index in range(92)]
    assert {len(row) for row in rows} == {3}
    batch = np.stack(rows[4:8], axis=1).ravel()
    assert batch.tolist() == epoch.block_ids[12:24].tolist()
    assert epoch.sample_batch(7) == {"cursor": 12, "blocks": 12, "worker": 3, "workers": 4}
    for index in (-1, 92):
        with pytest.raises(ValueError, match="not among"):
            epoch.sample_blocks(index)


def test_unknown_case() -> None:
    with pytest.raises(HvpflowError, match="did you mean 'unseen'"):
        analysis_epoch(toy(), sized_cache(200001, 10007), "unsen")  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, OLD, PACKED])
def test_too_small_a_cache_names_the_remedy(changes: dict[str, Any]) -> None:
    sampling = toy(**changes)
    needed = required_train_tokens(sampling, 10007)
    with pytest.raises(
        HvpflowError, match=rf"unseen epoch.* {needed} training tokens.* {needed - 1} are present.*prepare"
    ):
        analysis_epoch(sampling, sized_cache(needed - 1, 10007), "unseen")
    with pytest.raises(HvpflowError, match=rf"the training.* 30000 are present.*data\.prepare_train_tokens={needed}`"):
        analysis_epoch(sampling, sized_cache(30000, 10007), "seen")


@settings(max_examples=300, deadline=None)
@given(
    length=st.integers(1, 40),
    batch_blocks=st.integers(1, 6),
    parameters=st.integers(1, 600),
    epoch_share=st.sampled_from([0.25, 0.5, 1, 1.5]),
    num_epochs=st.integers(1, 5),
    shard_tokens=st.integers(1, 300),
    group_size=st.integers(1, 4),
    loader_version=st.sampled_from([1, 2, 2, 2]),
)
def test_required_tokens_are_enough_and_no_fewer_are(
    length: int,
    batch_blocks: int,
    parameters: int,
    epoch_share: float,
    num_epochs: int,
    shard_tokens: int,
    group_size: int,
    loader_version: int,
) -> None:
    try:
        sampling = toy(
            context_length=length,
            batch_tokens=length * batch_blocks,
            microbatch_size=1,
            num_parameters=parameters,
            tokens_per_parameters=epoch_share * num_epochs,
            epoch_tokens_per_parameters=epoch_share,
            loader_version=loader_version,
            buffer_size_mib=0.001,
            shuffle_group_size=group_size,
        )
    except HvpflowError:
        assume(False)
    needed = required_train_tokens(sampling, shard_tokens)
    cache = sized_cache(needed, shard_tokens)
    boundaries = sampling.boundaries()
    training = training_stream(sampling, cache.split("train"))
    seen, unseen = (analysis_epoch(sampling, cache, case) for case in ("seen", "unseen"))
    assert len(training) == len(set(training.tolist())) == boundaries[-1]
    assert seen.block_ids.tolist() == training[: boundaries[0]].tolist()
    assert len(set(unseen.block_ids.tolist())) == len(unseen.block_ids) == boundaries[0]
    assert unseen.block_ids.min() >= unseen.identity["physical_start_block"] > training.max()
    assert (unseen.block_ids.max() + 1) * length + 1 <= needed
    with pytest.raises(HvpflowError, match=f"prepare_train_tokens={needed}`"):
        analysis_epoch(sampling, sized_cache(needed - 1, shard_tokens), "unseen")
    # Text beyond what is needed changes neither epoch.
    for more in (1, shard_tokens + 7):
        larger = sized_cache(needed + more, shard_tokens)
        assert analysis_epoch(sampling, larger, "unseen").block_ids.tolist() == unseen.block_ids.tolist()
