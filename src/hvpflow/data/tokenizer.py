"""Text to tokens: a byte-level BPE trained on the text itself, a ``tokenizer.json``, or a tokenizer of the hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvpflow.errors import HvpflowError
from hvpflow.files import write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAIN_BPE = "train-bpe"
END_OF_TEXT = "<|endoftext|>"
MAX_VOCAB_SIZE = 2**16
MIN_BPE_VOCAB_SIZE = 257
"""256 bytes and the end of text."""
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "[EOS]")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer and the token that ends every document."""

    tokenizer: Tokenizer
    eos_token_id: int
    revision: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ``tokenizer.json`` that ``save`` writes."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json``."""
        write_text(directory / "tokenizer.json", self._text())

    def encode(self, documents: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each document and one end of text, uint16 [tokens + 1]. Documents are encoded in parallel."""
        encodings = self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        end = [self.eos_token_id]
        return [np.asarray(encoding.ids + end, dtype=np.uint16) for encoding in encodings]

    def _text(self) -> str:
        return self.tokenizer.to_str(pretty=True)


def train_bpe(documents: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE; the end of text is token 0. The result depends on the documents alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise HvpflowError(
            f"model.vocab_size is {vocab_size}; a trained byte-level tokenizer needs at least {MIN_BPE_VOCAB_SIZE}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return _ready(tokenizer, eos_token_id=0, vocab_size=vocab_size, name=TRAIN_BPE, revision=None)


def load_tokenizer(name: str, revision: str, vocab_size: int) -> TextTokenizer:
    """Load a tokenizer: ``name`` is the path of a ``tokenizer.json`` or of its directory, or a name on the hub.

    Raises:
        HvpflowError: it cannot be loaded, its vocabulary exceeds ``vocab_size``, or it has no end of text.
    """
    path, found = _locate(name, revision)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exception for a file that it cannot read.
        raise HvpflowError(f"cannot load the tokenizer {path}: {error}") from error
    return _ready(
        tokenizer, eos_token_id=_end_of_text(tokenizer, path), vocab_size=vocab_size, name=name, revision=found
    )


@contextlib.contextmanager
def parallelism(num_workers: int) -> Iterator[None]:
    """Encode with ``num_workers`` threads; the tokens are the same for any number.

    The library reads the number of threads once in a process, at the first use.
    """
    settings = {"TOKENIZERS_PARALLELISM": "true" if num_workers > 1 else "false", "RAYON_NUM_THREADS": str(num_workers)}
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _ready(
    tokenizer: Tokenizer, *, eos_token_id: int, vocab_size: int, name: str, revision: str | None
) -> TextTokenizer:
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise HvpflowError(
            f"tokenizer {name!r} has token ids up to {largest}, but model.vocab_size is {vocab_size}: "
            f"set model.vocab_size={largest + 1}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A document that spells the end of text must not end there.
    tokenizer.encode_special_tokens = True
    if revision is None:
        digest = hashlib.sha256(tokenizer.to_str(pretty=True).encode()).hexdigest()
        revision = f"sha256-{digest[:12]}"
    return TextTokenizer(tokenizer=tokenizer, eos_token_id=eos_token_id, revision=revision)


def _locate(name: str, revision: str) -> tuple[Path, str | None]:
    """The ``tokenizer.json`` of that name, and its revision where the hub gives or the user asks for one."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        return path, None if revision == "main" else revision
    if path.suffix == ".json" or path.is_absolute():
        raise HvpflowError(
            f"data.tokenizer: no such file {path}; give 'train-bpe', a tokenizer.json or a name on the hub"
        )
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(name, "tokenizer.json", revision=revision))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HvpflowError(
            f"data.tokenizer: cannot fetch tokenizer.json of {name!r}, revision {revision!r}, from the hub: {reason}; "
            "check the name and the network, or give 'train-bpe' or a tokenizer.json"
        ) from error
    with contextlib.suppress(Exception):
        # Names the end of text; not every tokenizer has one.
        hf_hub_download(name, "tokenizer_config.json", revision=revision)
    # The hub's cache keeps a file under its commit.
    return path, path.parent.name


def _end_of_text(tokenizer: Tokenizer, path: Path) -> int:
    configured = _configured_end(path.with_name("tokenizer_config.json"))
    names = (configured,) if configured else _KNOWN_ENDS
    for name in names:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    raise HvpflowError(
        f"tokenizer {path} has no end-of-text token (looked for {', '.join(names)}): "
        "name one as eos_token in a tokenizer_config.json beside it"
    )


def _configured_end(path: Path) -> str | None:
    try:
        entry: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
