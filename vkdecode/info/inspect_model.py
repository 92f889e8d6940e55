"""Facts of a model's files and of its place on a device, gathered without reading a weight."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vkdecode.decode import MemoryReport, check_kv_cache, check_load
from vkdecode.errors import ModelFileError, TokenizerError, UnsupportedModelError, VkDecodeError, VkDecodeWarning
from vkdecode.gpu import Device, open_device
from vkdecode.models import ModelPlan
from vkdecode.models.registry import architecture_of
from vkdecode.text import Tokenizer, load_tokenizer
from vkdecode.weights import WeightSource, open_weights
from vkdecode.weights.gguf_header import GgufHeader, read_header
from vkdecode.weights.jsonfile import read_json_object
from vkdecode.weights.recode import asked_dtype

DEFAULT_CONTEXT = 4096

# Sizes by the name of most configs, each with the names that it has elsewhere: other families, and GGUF metadata.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "block_count"),
    "hidden_size": ("n_embd", "embedding_length"),
    "intermediate_size": ("n_inner", "feed_forward_length"),
    "num_attention_heads": ("n_head", "attention.head_count"),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "num_experts": ("num_local_experts", "expert_count"),
    "num_experts_per_tok": ("expert_used_count",),
    "vocab_size": (),
    "max_position_embeddings": ("n_positions", "context_length"),
    "sliding_window": ("attention.sliding_window",),
}
_GROUPS: tuple[tuple[str, str], ...] = (
    ("norms", r"norm|(?:^|\.)ln_"),
    ("biases", r"bias$|sinks"),
    ("output", r"lm_head|embed_out|^output\."),
    ("embedding", r"embed|wte|wpe|token_embd|position_embd"),
    ("experts", r"experts\.|_exps\."),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|feed_forward|ffn|block_sparse_moe"),
)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one kind: how many numbers, and how many tensors are stored in which type."""

    parameters: int
    types: Mapping[str, int]


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model.

    Attributes:
        path: its folder or file.
        model_type: as Hugging Face calls it; for a GGUF file of an unknown architecture, as the file calls it.
        file_bytes: bytes of its weights in files.
        parameters: numbers in all tensors.
        sizes: layers, widths, heads and so on, by the names of most configs.
        tensors: groups of tensors by name.
        chat_template: whether the files bring one; None where the tokenizer cannot be used.
        ends: texts of the tokens that end an answer, by id.
        tokenizer_problem: why there is no tokenizer, where there is none.
        device: what it was planned for; None where there is none.
        memory: what it takes there; None where it cannot be planned.
        problems: why it will not run; empty where it will.

    """

    path: str
    model_type: str
    file_bytes: int
    parameters: int
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorGroup]
    chat_template: bool | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    tokenizer_problem: str | None = None
    device: str | None = None
    memory: MemoryReport | None = None
    problems: Sequence[str] = ()

    @property
    def runs(self) -> bool:
        """Whether the model will run on the device with the context that was asked for."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, with `runs` and the memory's total."""
        plain = asdict(self)
        if self.memory is not None:
            plain["memory"]["total"] = self.memory.total
        return {**plain, "ends": {str(token): text for token, text in self.ends.items()}, "runs": self.runs}


def inspect_model(
    path: str, device: str | int | None = None, weights: str | None = None, context: int | None = None, kv: str = "f32"
) -> ModelInfo:
    """Gather what there is to know; what keeps the model from running becomes a problem, not an error.

    Raises:
        ModelFileError: there is no model, or its files are damaged.
        InvalidInputError: `weights` or `kv` is no type.

    """
    asked_dtype(weights)
    try:
        source = open_weights(path)
    except UnsupportedModelError as error:
        return _unopened(Path(path).expanduser(), str(error))
    try:
        known = _of_source(source)
        known.update(_of_tokenizer(source))
        known.update(_on_device(source, device, weights, context, kv))
    finally:
        source.close()
    return ModelInfo(**known)


def _unopened(path: Path, problem: str) -> ModelInfo:
    """The little that headers say of a model of a kind that is not supported."""
    config: Mapping[str, Any] = {}
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    kind = "unknown"
    if path.is_dir():
        config = read_json_object(path / "config.json")
        kind = str(config.get("model_type", kind))
    else:
        try:
            header = read_header(path)
        except UnsupportedModelError:
            return ModelInfo(str(path), kind, _file_bytes(path), 0, {}, {}, problems=(problem,))
        kind = str(header.metadata.get("general.architecture", kind))
        config = _without_prefix(header, kind)
        tensors = {name: (tensor.shape, tensor.type.name) for name, tensor in header.tensors.items()}
    sizes, groups = _sizes(config), _groups(tensors)
    return ModelInfo(str(path), kind, _file_bytes(path), _count(tensors), sizes, groups, problems=(problem,))


def _without_prefix(header: GgufHeader, arch: str) -> dict[str, Any]:
    values = {key.removeprefix(f"{arch}."): value for key, value in header.metadata.items()}
    return {**values, "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ()))}


def _of_source(source: WeightSource) -> dict[str, Any]:
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in source.names():
        try:
            info = source.info(name)
        except UnsupportedModelError:
            continue  # planning meets it again, and says so
        tensors[name] = (info.shape, info.stored_as)
    return {
        "path": str(source.path),
        "model_type": str(source.config["model_type"]),
        "file_bytes": _file_bytes(source.path),
        "parameters": _count(tensors),
        "sizes": _sizes(source.config),
        "tensors": _groups(tensors),
    }


def _count(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> int:
    return sum(math.prod(shape) for shape, _ in tensors.values())


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for name, others in _SIZES.items():
        value = next((config[key] for key in (name, *others) if config.get(key) is not None), None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[name] = value
    return found


def _groups(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, TensorGroup]:
    parameters: Counter[str] = Counter()
    types: dict[str, Counter[str]] = {}
    for name, (shape, stored_as) in tensors.items():
        group = next((group for group, pattern in _GROUPS if re.search(pattern, name)), "other")
        parameters[group] += math.prod(shape)
        types.setdefault(group, Counter())[stored_as] += 1
    order = [group for group, _ in sorted(parameters.items(), key=lambda entry: -entry[1])]
    return {group: TensorGroup(parameters[group], dict(types[group].most_common())) for group in order}


def _of_tokenizer(source: WeightSource) -> dict[str, Any]:
    try:
        tokenizer: Tokenizer = load_tokenizer(source)
    except TokenizerError as error:
        return {"tokenizer_problem": str(error)}
    ends = {token: tokenizer.decode([token]) for token in sorted(tokenizer.eos_token_ids)}
    return {"chat_template": tokenizer.chat_template is not None, "ends": ends}


def _on_device(
    source: WeightSource, wanted: str | int | None, weights: str | None, context: int | None, kv: str
) -> dict[str, Any]:
    try:
        architecture_of(source.config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VkDecodeWarning)
            device = open_device(wanted)
    except VkDecodeError as error:
        return {"problems": (str(error),)}
    with device:
        known: dict[str, Any] = {"device": str(device.info)}
        try:
            model = ModelPlan(source, device, asked_dtype(weights))
        except ModelFileError:
            raise
        except VkDecodeError as error:
            return {**known, "problems": (str(error),)}
        rows = context or min(model.config.max_position_embeddings, DEFAULT_CONTEXT)
        known["memory"] = model.memory_report(rows, kv)
        known["problems"] = tuple(_problems(model, device, known["memory"]))
    return known


def _problems(model: ModelPlan, device: Device, report: MemoryReport) -> list[str]:
    problems = []
    try:
        check_load(model, model.load_plan)
        check_kv_cache(model, model.weight_specs(), model.kv_geometry(report.max_seq_len, report.kv_dtype))
    except VkDecodeError as error:
        problems.append(str(error))
    if not problems and report.total > device.free_bytes:
        problems.append(
            f"with {report.max_seq_len} positions it needs {report.total} bytes, but device {device.info} has "
            f"{device.free_bytes} of {report.heap} free; use a smaller context or a KV cache of f16"
        )
    most = model.config.max_position_embeddings
    if report.max_seq_len > most:
        problems.append(f"the model has {most} positions, fewer than the {report.max_seq_len} asked for")
    return problems
