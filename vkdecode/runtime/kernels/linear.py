"""Products of a weight with one token or with tiles of several."""

from __future__ import annotations

from vkdecode.errors import UnsupportedModelError
from vkdecode.gpu import Lanes, registry
from vkdecode.graph import Graph, LinearAttrs, Node, NodeId, Op, SymId, WeightSpec
from vkdecode.runtime.kernels.choice import MAX_WORKGROUPS, Choice, float_bits
from vkdecode.runtime.passes import MAX_PRODUCT_PASSES, linear_passes
from vkdecode.weights.block_layout import PACK

# The numbers that linear.comp and activations.glsl give them.
NORMS = {None: 0, "rms": 1, "layer": 2}
ACTIVATIONS = {None: 0, Op.SILU: 1, Op.GELU_TANH: 2, Op.CLAMPED_SWIGLU: 3}
_MAX_KEPT_CHUNKS = 64  # of x in a lane's own array; compilers take longer for larger ones


def linear(graph: Graph, node: Node, lanes: Lanes) -> Choice:
    """A product and what is fused around it."""
    attrs = graph.attrs(node.id, LinearAttrs)
    x, weight, *rest = node.inputs
    spec = graph.attrs(weight, WeightSpec)
    bias = rest.pop(0) if attrs.bias else x
    tokens = node.shape[0]
    # Experts are taken token by token, as that many more tokens.
    experts, used = max(spec.experts, 1), max(attrs.experts_used, 1)
    token_tile = 1 if tokens == 1 or attrs.experts_used else lanes.token_tile
    norm: list[NodeId] = []
    if attrs.norm_epsilon is not None:
        norm, rest = rest[: 1 + attrs.norm_bias], rest[1 + attrs.norm_bias :]
    # What a kernel does not read is bound to x.
    bindings = [weight, x, bias, node.id, *norm, *[x] * (2 - len(norm))]
    push: dict[str, int | SymId] = {}
    if token_tile > 1 and tokens % token_tile:
        raise UnsupportedModelError(f"a step of {tokens} tokens is not a multiple of {token_tile}")
    if attrs.write is not None:
        cos, sin = (rest.pop(0), rest.pop(0)) if attrs.rotary_dim else (x, x)
        cache_k, cache_v, token_count, *offset = rest
        bindings += [cos, sin, cache_k, cache_v, *(offset or [x]), token_count]
        push |= {"cache_rows": graph.node(cache_k).shape[1], "cached_len": attrs.write.cached_len or 0}
    else:
        if attrs.epilogue == "plain":
            bindings.append(rest.pop(0) if attrs.residual else x)
        bindings.append(graph.find_data("token_count") if token_tile > 1 else rest.pop() if attrs.experts_used else x)
    if spec.columns % 4:
        raise UnsupportedModelError(f"a product over {spec.columns} features: they must be a multiple of 4")
    variant = {"LANES": lanes.form, "DTYPE": spec.dtype.value, "TOKENS": token_tile, "EPILOGUE": attrs.epilogue}
    kv_dtype = graph.node(cache_k).dtype.value if attrs.write is not None else "none"
    kernel = registry().get("linear", **variant, KV=kv_dtype)
    paired = attrs.epilogue != "plain"
    rows = spec.units // experts
    tiles = -(-rows // lanes.tile) * (2 if paired else 1)
    blocks = -(-tiles // lanes.row_tiles)
    token_tiles = tokens // token_tile * used
    wanted = lanes.wanted_workgroups and max(lanes.wanted_workgroups // token_tiles, 1)
    chunks = -(-spec.columns // PACK)
    most = lanes.workgroup if token_tile == 1 else lanes.prompt_workgroup
    split = min(most // lanes.tile, 1 << (chunks.bit_length() - 1))
    staged = PACK * split * (max(256 // (PACK * split), 1) if token_tile == 1 else 1)
    staged = min(staged, chunks * PACK)
    once, each = linear_passes(chunks, lanes.tile * split, staged, lanes, token_tile)
    groups = -(-blocks // min(wanted or MAX_WORKGROUPS, MAX_WORKGROUPS))
    groups = max(min(groups, (MAX_PRODUCT_PASSES - once) // each), -(-blocks // MAX_WORKGROUPS))
    keep_x = lanes.form == "subgroup" and token_tile > 1 and groups > 1 and chunks <= _MAX_KEPT_CHUNKS
    constants = {
        "WORKGROUP": lanes.tile * split,
        "TILE": lanes.tile,
        "COLUMNS": spec.columns,
        "HAS_BIAS": int(attrs.bias),
        "EPSILON_BITS": float_bits(attrs.norm_epsilon or 0.0),
        "HEAD_DIM": attrs.write.head_dim if attrs.write else 2,
        "ROTARY_DIM": attrs.rotary_dim,
        "QUERY_HEADS": node.shape[1] // attrs.write.head_dim if attrs.write else 0,
        "X_CHUNK": staged,
        "NORM": NORMS[None if attrs.norm_epsilon is None else attrs.norm],
        "HAS_NORM_BIAS": int(attrs.norm_bias),
        "ACTIVATION": ACTIVATIONS[attrs.activation],
        "EXPERTS_USED": attrs.experts_used,
        "EXPERT_X": int(graph.node(x).shape[1] != spec.columns),
        "KEEP_X": int(keep_x),
    }
    if attrs.epilogue == "plain":
        constants["HAS_RESIDUAL"] = int(attrs.residual)
    if attrs.write is not None:
        constants |= {
            "KV_HEADS": attrs.write.kv_heads,
            "OFFSET_ON_DEVICE": len(offset),
        }
    push |= {"rows": rows, "groups": groups, "outputs": node.shape[1] // used, "expert_blocks": blocks}
    work = tokens * used * rows * (2 if paired else 1) * spec.columns
    workgroups = (-(-blocks // groups), token_tiles, 1)
    return Choice(kernel, tuple(bindings), constants, workgroups, push, work)
