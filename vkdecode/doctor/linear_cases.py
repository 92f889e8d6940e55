"""The kernels of products with weights, norms and embeddings, each at an odd size against a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkdecode.doctor import references
from vkdecode.doctor.dispatch import UNSET, error_of, float_bits, floats, generator, normal, run_kernel, unset
from vkdecode.doctor.kv_cases import KV, check_rows
from vkdecode.gpu import Device, Lanes
from vkdecode.graph import Op, WeightSpec
from vkdecode.runtime.kernels.linear import ACTIVATIONS, NORMS
from vkdecode.runtime.weight_layout import device_rows, pack_rows
from vkdecode.weights.block_layout import PACK
from vkdecode.weights.blocks import decode_rows, ggml_type, random_rows
from vkdecode.weights.dtypes import BLOCK_DTYPES, DType

F64 = NDArray[np.float64]

COLUMNS = 76
_BLOCK_COLUMNS = 256  # the fewest that every block format can have
EPSILON = 1e-3
_Q_HEADS, _KV_HEADS, _HEAD_DIM, _ROTARY_DIM = 3, 1, 20, 12
_CACHE_ROWS, _OFFSET = 21, 7
_ROOM, _COUNT = 16, 11


@dataclass(frozen=True)
class _Form:
    """A kernel's axes, and what else is fused into it."""

    dtype: str
    prompt: bool  # several tokens at a time
    epilogue: str
    norm: str | None = None
    activation: Op | None = None
    residual: bool = False
    kv: str = "none"  # what the rope epilogue's cache holds

    def key(self, lanes: Lanes) -> str:
        """Its name."""
        tokens = lanes.token_tile if self.prompt else 1
        return f"linear LANES={lanes.form} DTYPE={self.dtype} TOKENS={tokens} EPILOGUE={self.epilogue} KV={self.kv}"


_FORMS = (
    _Form("f32", False, "plain"),
    _Form("f16", False, "rope", "rms", kv="f16"),
    _Form("bf16", False, "gated", "rms", Op.SILU),
    _Form("f16", False, "plain", residual=True),
    _Form("f32", True, "plain", "layer", Op.GELU_TANH),
    _Form("f16", True, "gated", "rms", Op.SILU),
    _Form("f32", True, "gated", None, Op.CLAMPED_SWIGLU),
    _Form("bf16", True, "plain", residual=True),
    _Form("bf16", True, "rope", "rms", kv="f32"),
    *(_Form(dtype.value, prompt, "plain", "rms", None, True) for dtype in BLOCK_DTYPES for prompt in (False, True)),
)


def linear_keys(lanes: Lanes) -> list[str]:
    """Products of every element type, norm and epilogue, for one token and for several."""
    return [one.key(lanes) for one in _FORMS]


def norm_keys(form: str) -> list[str]:
    """Both norms."""
    return [f"norm LANES={form} NORM={norm}" for norm in ("rms", "layer")]


EMBED_KEYS = [f"embed DTYPE={dtype} PART={part}" for dtype in ("f32", "f16", "bf16") for part in (0, 1)]
EMBED_KEYS += [f"embed DTYPE={dtype.value} PART=0" for dtype in BLOCK_DTYPES]


def weight_of(rng: np.random.Generator, rows: int, dtype: DType) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """A random matrix as files store it, and as float64."""
    if not dtype.is_block:
        held = normal(rng, rows, COLUMNS).astype(dtype.numpy)
        return held, held.astype(np.float64)
    blocks = random_rows(rng, rows, _BLOCK_COLUMNS, dtype)
    return blocks, decode_rows(blocks, ggml_type(dtype), dtype.block_bytes).astype(np.float64)


def packed(held: NDArray[Any], spec: WeightSpec, lanes: Lanes) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The words of a weight on the device, and the row in each of its slots (-1 for padding)."""
    slots = device_rows(spec, lanes.tile, lanes.block_rows)
    rows = np.where((slots >= 0)[:, None], held[np.maximum(slots, 0)], np.zeros(1, held.dtype))
    return pack_rows(np.ascontiguousarray(rows), spec.dtype, lanes.tile), slots


def check_linear(device: Device, lanes: Lanes, key: str) -> float:
    """Run one product; the error relative to the largest value."""
    fused = next(one for one in _FORMS if one.key(lanes) == key)
    dtype, epilogue = DType(fused.dtype), fused.epilogue
    rng = generator(key)
    columns = _BLOCK_COLUMNS if dtype.is_block else COLUMNS
    room, count = (_ROOM, _COUNT) if fused.prompt else (1, 1)
    units, outputs = lanes.block_rows + 5, lanes.block_rows + 5
    if epilogue == "rope":
        units, outputs = (_Q_HEADS + 2 * _KV_HEADS) * _HEAD_DIM // 2, _Q_HEADS * _HEAD_DIM
    paired = epilogue in ("rope", "gated")
    rows = 2 * units if paired else units
    parts = (units, units) if epilogue == "gated" else (rows,)
    order = epilogue if paired else "plain"
    spec = WeightSpec(("weight",) * len(parts), parts, columns, dtype, order, _HEAD_DIM, _ROTARY_DIM)
    held, weight = weight_of(rng, rows, dtype)
    words, slots = packed(held, spec, lanes)
    x, residual = unset(room, columns), unset(room, outputs)
    x[:count], residual[:count] = normal(rng, count, columns), normal(rng, count, outputs)
    bias, norm_weight, norm_bias = normal(rng, rows), normal(rng, columns), normal(rng, columns)
    cos, sin = unset(room, _HEAD_DIM // 2), unset(room, _HEAD_DIM // 2)
    turned = _ROTARY_DIM // 2
    cos[:count, :turned], sin[:count, :turned] = normal(rng, count, turned), normal(rng, count, turned)
    buffers: dict[str, NDArray[Any]] = {
        "weight": words,
        "x": x,
        "bias": np.where(slots >= 0, bias[np.maximum(slots, 0)], np.float32(0)),
        "y": unset(room, outputs),
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
    }
    if epilogue == "plain":
        buffers["residual"] = residual
    cache = unset(_KV_HEADS, _CACHE_ROWS, _HEAD_DIM, dtype=KV.get(fused.kv, np.float32))
    on_device = epilogue == "rope" and fused.prompt
    if epilogue == "rope":
        offset = np.array([_OFFSET if on_device else UNSET, UNSET], np.uint32)
        buffers |= {"rope_cos": cos, "rope_sin": sin, "cache_k": cache, "cache_v": cache, "offset": offset}
    if fused.prompt or epilogue == "rope":
        buffers["token_count"] = np.array([count], np.uint32)
    else:
        buffers["route"] = unset(1)
    blocks = -(-(-(-units // lanes.tile) * (2 if paired else 1)) // lanes.row_tiles)
    groups = 2
    workgroup = lanes.prompt_workgroup if fused.prompt else lanes.workgroup
    constants = {
        "WORKGROUP": workgroup,
        "TILE": lanes.tile,
        "COLUMNS": columns,
        "HAS_BIAS": 1,
        "EPSILON_BITS": float_bits(EPSILON),
        "HEAD_DIM": _HEAD_DIM,
        "ROTARY_DIM": _ROTARY_DIM,
        "QUERY_HEADS": _Q_HEADS,
        # Less than all columns, so that the shared form stages more than once where it has few lanes to a row.
        "X_CHUNK": PACK * (workgroup // lanes.tile),
        "NORM": NORMS[fused.norm],
        "HAS_NORM_BIAS": 1,
        "ACTIVATION": ACTIVATIONS[fused.activation],
        "EXPERTS_USED": 0,
        "EXPERT_X": 0,
        "KEEP_X": 1,
        **({"HAS_RESIDUAL": int(fused.residual)} if epilogue == "plain" else {}),
        **({"KV_HEADS": _KV_HEADS, "OFFSET_ON_DEVICE": int(on_device)} if epilogue == "rope" else {}),
    }
    push = {"rows": units, "groups": groups, "outputs": outputs, "expert_blocks": blocks}
    if epilogue == "rope":
        push |= {"cache_rows": _CACHE_ROWS, "cached_len": int(UNSET) if on_device else _OFFSET}
    size = (-(-blocks // groups), room // (lanes.token_tile if fused.prompt else 1), 1)
    left = run_kernel(device, key, buffers, constants, size, push)
    inputs = _normalized(fused.norm, x[:count].astype(np.float64), norm_weight.astype(np.float64), norm_bias)
    turns = [part[:count, :turned].astype(np.float64) for part in (cos, sin)]
    finished = _finished(epilogue, fused.activation, inputs @ weight.T + bias, turns)
    if epilogue == "rope":
        stored = finished[:, outputs:].reshape(count, 2, _KV_HEADS, _HEAD_DIM)
        for which, name in enumerate(("cache_k", "cache_v")):
            check_rows(left[name], cache, stored[:, which], _OFFSET)
        finished = finished[:, :outputs]
    actual = floats(left["y"]).reshape(room, outputs)[:count]
    return error_of(actual, finished + residual[:count] if fused.residual else finished)


def _normalized(norm: str | None, x: F64, weight: F64, bias: NDArray[np.float32]) -> F64:
    epsilon = float(np.float32(EPSILON))
    if norm == "rms":
        return references.rms_norm(x, weight, epsilon)
    return references.layer_norm(x, weight, bias.astype(np.float64), epsilon) if norm == "layer" else x


def _finished(epilogue: str, activation: Op | None, value: F64, turns: Sequence[F64]) -> F64:
    """What follows a product with its bias; `turns` are cosines and sines of the rotated pairs."""
    if epilogue == "gated":
        gate, up = np.split(value, 2, axis=1)
        if activation is Op.CLAMPED_SWIGLU:
            return references.clamped_swiglu(gate, up)
        return references.silu(gate) * up
    if epilogue == "rope":
        heads = value.reshape(len(value), -1, _HEAD_DIM).copy()
        heads[:, :-_KV_HEADS] = references.rotate(heads[:, :-_KV_HEADS], turns[0], turns[1])
        return heads.reshape(len(value), -1)
    return references.gelu_tanh(value) if activation is Op.GELU_TANH else value


def check_norm(device: Device, lanes: Lanes, key: str) -> float:
    """Run one norm over rows of which one is far from zero; the error relative to the largest value."""
    rng = generator(key)
    x, weight, bias = normal(rng, 3, COLUMNS), normal(rng, COLUMNS), normal(rng, COLUMNS)
    x[1] += np.float32(30)
    residual, nothing = normal(rng, 3, COLUMNS), unset(1)
    buffers: dict[str, NDArray[Any]] = {"x": x, "weight": weight, "y": unset(3, COLUMNS), "residual": residual}
    buffers |= {"rope_cos": nothing, "rope_sin": nothing}
    spec = {"WORKGROUP": lanes.workgroup, "COLUMNS": COLUMNS, "EPSILON_BITS": float_bits(EPSILON)}
    spec |= {"X_OFFSET": 0, "X_STRIDE": COLUMNS, "FIRST_GROUPS": 0, "HAS_RESIDUAL": 1, "HEAD_DIM": 1, "ROTARY_DIM": 0}
    epsilon = float(np.float32(EPSILON))
    if "NORM=layer" in key:
        buffers["bias"] = bias
        spec["HAS_NORM_BIAS"] = 1
        expected = references.layer_norm(
            x.astype(np.float64), weight.astype(np.float64), bias.astype(np.float64), epsilon
        )
    else:
        expected = references.rms_norm(x.astype(np.float64), weight.astype(np.float64), epsilon)
    expected = expected + residual
    return error_of(floats(run_kernel(device, key, buffers, spec, (3, 1, 1))["y"]), expected)


def check_embed(device: Device, lanes: Lanes, key: str) -> float:
    """Look up rows, of the whole embedding or of a part of it; values must be exact but for the last place."""
    axes = dict(term.split("=") for term in key.split()[1:])
    rng, dtype, part = generator(key), DType(axes["DTYPE"]), axes["PART"] == "1"
    columns = _BLOCK_COLUMNS if dtype.is_block else COLUMNS
    rows, first = 2 * lanes.block_rows + 3, 7 if part else 0
    held, weight = weight_of(rng, rows, dtype)
    words, _ = packed(held, WeightSpec(("weight",), (rows,), columns, dtype), lanes)
    ids = np.array([0, rows - 1, lanes.tile, 1, lanes.tile - 1], np.uint32)
    others = normal(rng, ids.size + 1, columns)
    buffers: dict[str, NDArray[Any]] = {
        "weight": words,
        "token_ids": np.concatenate([ids + first, np.zeros(1, np.uint32)]).astype(np.uint32),
        "y": unset(ids.size + 1, columns),
    }
    spec = {"WORKGROUP": min(lanes.workgroup, 64), "TILE": lanes.tile, "COLUMNS": columns}
    expected = weight[np.append(ids, 0)]
    if part:
        buffers["others"] = others
        spec |= {"FIRST_ROW": first, "ROW_COUNT": rows, "HAS_OTHERS": 1}
        expected[-1] = others[-1]
    chunks = -(-columns // PACK)
    groups = (-(-chunks // spec["WORKGROUP"]), ids.size + 1, 1)
    return error_of(floats(run_kernel(device, key, buffers, spec, groups)["y"]), expected)
