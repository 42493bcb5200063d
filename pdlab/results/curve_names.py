"""Short names of the curves of one folder, without what all of them share or what another value determines.

Readers compare curves by a few settings: GPU, framework, precision, parallelism, lengths. These are in every name if
they differ. Any other setting is in a name only if two curves would have the same name without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from pdlab.core.text import counted

MOST_SHOWN = 40  # characters of a value
# Keys whose values need no key beside them, in the order of a name.
_GPU_KEYS = ("gpu", "gpu_type", "hw", "hardware")
PLAIN = (*_GPU_KEYS, "framework", "engine", "backend", "precision", "dtype")
_COUNTS = ("tp", "pp", "dp", "ep")
_VERSION, _GPUS = "framework_version", "num_gpus"
_COMPARED = (*PLAIN, "tp", "pp", "dp")


def short_names(values: Sequence[Mapping[str, str]], keys: Sequence[str], bare: Sequence[str]) -> list[str]:
    """``h200 vllm fp4 tp4, 1024:1024``: a name for each curve, of the ``keys`` that differ between the curves.

    ``values``: key -> value of each curve. ``bare``: keys whose value is the name, without the key. The names are
    unique if the values differ in their first `MOST_SHOWN` characters.
    """
    always = [key for key in keys if key in _COMPARED or key in bare]
    shown: list[set[str]] = [set(always) for _ in values]
    groups = grouped(range(len(values)), lambda i: tuple(values[i].get(key) for key in always))
    # The GPUs last: the parallelism determines them most of the time.
    for key in sorted((key for key in keys if key not in always), key=lambda key: key == _GPUS):
        column = [value.get(key) for value in values]
        parts = [grouped(group, column.__getitem__) for group in groups]
        for group, split in zip(groups, parts, strict=True):
            if len(split) > 1:
                for i in group:
                    shown[i].add(key)
        groups = [part for split in parts for part in split]
    tails = {key: _common_tail([each[key] for each in values if key in each]) for key in _GPU_KEYS}
    return [
        _name(each, [key for key in keys if key in its], bare, tails) for each, its in zip(values, shown, strict=True)
    ]


def grouped(numbers: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """The numbers in groups of one key, in the order of the first of each group."""
    groups: dict[Hashable, list[int]] = {}
    for number in numbers:
        groups.setdefault(key(number), []).append(number)
    return list(groups.values())


def _common_tail(values: Sequence[str]) -> str:
    """The last word that all values share, such as sxm of h100_sxm and h200_sxm, with its underscore."""
    tails = {value[value.rindex("_") :] if "_" in value else "" for value in values}
    return tails.pop() if len(tails) == 1 and len(set(values)) > 1 else ""


def _name(values: Mapping[str, str], keys: Sequence[str], bare: Sequence[str], tails: Mapping[str, str]) -> str:
    words, texts = [], []
    for key in sorted(keys, key=_place):
        value = values.get(key)
        text = (value or "")[:MOST_SHOWN]
        if key in PLAIN or key == _VERSION:
            words.append(text.removesuffix(tails.get(key, "")) if value else f"no {key.removeprefix('framework_')}")
        elif key in _COUNTS and value is not None:
            words.append(f"{key}{text}")
        elif key == _GPUS and value is not None:
            words.append(counted(int(text), "GPU") if text.isdecimal() else f"{text} GPUs")
        elif key in bare:
            texts.append(value or "")
        else:
            texts.append(f"no {key}" if value is None else f"{key}={text}")
    return ", ".join(dict.fromkeys(filter(None, [" ".join(filter(None, words)), *texts])))


def _place(key: str) -> int:
    order = (*_GPU_KEYS, "framework", _VERSION, *PLAIN, *_COUNTS, _GPUS)
    return order.index(key) if key in order else len(order)
