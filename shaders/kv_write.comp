#version 450
//! variants KV=f32,f16
// Puts this step's K and V rows into the cache of a layer: cache[head][cached_len + token] = x[token][head].
//
// With OFFSET_ON_DEVICE the offset is read from device memory, so that a held recording writes elsewhere for each token; else it
// is a push constant.
#extension GL_GOOGLE_include_directive : require
#include "kv_cache.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint KV_HEADS = 1;
layout(constant_id = 2) const uint HEAD_DIM = 4;
layout(constant_id = 3) const uint OFFSET_ON_DEVICE = 0;
layout(constant_id = 4) const uint K_OFFSET = 0;  // where a token's row is in k, and from token to token, in vec4
layout(constant_id = 5) const uint K_STRIDE = 1;
layout(constant_id = 6) const uint V_OFFSET = 0;
layout(constant_id = 7) const uint V_STRIDE = 1;

layout(std430, binding = 0) readonly buffer K { vec4 k[]; };
layout(std430, binding = 1) readonly buffer V { vec4 v[]; };
layout(std430, binding = 2) writeonly buffer CacheK { KV_WORD cache_k[]; };
layout(std430, binding = 3) writeonly buffer CacheV { KV_WORD cache_v[]; };
layout(std430, binding = 4) readonly buffer TokenCount { uint token_count[]; };
layout(std430, binding = 5) readonly buffer Offset { uint offset[]; };  // cached_len, attended_len

// Where the parts begin that are bound, in units of 16 bytes.
layout(push_constant) uniform Push {
    uint k_first;
    uint v_first;
    uint cache_k_first;
    uint cache_v_first;
    uint token_count_first;
    uint offset_first;
    uint cache_rows;
    uint cached_len;
};

void main() {
    const uint row_words = HEAD_DIM / 4;
    uint word = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    uint row = token + (OFFSET_ON_DEVICE != 0 ? offset[4 * offset_first] : cached_len);
    if (word >= KV_HEADS * row_words || token >= token_count[4 * token_count_first] || row >= cache_rows) return;
    uint target = (word / row_words * cache_rows + row) * row_words + word % row_words;
    cache_k[KV_UNIT_WORDS * cache_k_first + target] = KV_STORE(k[k_first + token * K_STRIDE + K_OFFSET + word]);
    cache_v[KV_UNIT_WORDS * cache_v_first + target] = KV_STORE(v[v_first + token * V_STRIDE + V_OFFSET + word]);
}
