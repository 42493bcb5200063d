"""The embedded models: tiny ones with real, seeded weights and their own tokenizer, built from a config.json.

Runs on vLLM's CPU backend. vLLM's dummy weights would repeat one token whatever the prompt, so
that no canary could fail on them; here weights are drawn at a scale at which the greedy
continuation depends on early prompt tokens (tests/live proves it).
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from pdlab.core.catalog import ModelShape
from pdlab.core.files import built_once

RECIPE = 2  # raise it when the code below changes: a cached model of another recipe is not used
SEED = 0
# Of the scales tried, 0.02 (transformers' default) repeats one token; at 0.2 every prompt token matters.
INITIALIZER_RANGE = 0.2


def tiny_model_folder(shape: ModelShape, cache: Path) -> Path:
    """Where the model of this shape, built by this recipe, is or will be."""
    digest = hashlib.sha256(f"{RECIPE} {json.dumps(shape.config, sort_keys=True)}".encode()).hexdigest()[:8]
    return cache / "models" / f"{shape.name}-{digest}"


def ensure_tiny_model(shape: ModelShape, cache: Path) -> Path:
    """Folder of the tiny model under ``cache``, built if it is not there (about 10 s, once)."""

    def build(folder: Path) -> None:
        build_tokenizer(folder, shape.vocab)
        _build_weights(folder, shape)

    return built_once(tiny_model_folder(shape, cache), build)


def build_tokenizer(folder: Path, vocab: int) -> None:
    """Train a byte-level BPE tokenizer of exactly ``vocab`` entries on seeded synthetic words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(SEED)
    syllables = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(4000)]
    lines = [" ".join(rng.choices(words, k=20)) for _ in range(2000)]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _build_weights(folder: Path, shape: ModelShape) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in shape.config.items() if name not in ("architectures", "model_type")}
    config = AutoConfig.for_model(
        shape.config["model_type"],
        **given,
        initializer_range=INITIALIZER_RANGE,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder, safe_serialization=True)
