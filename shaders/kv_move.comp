#version 450
//! variants KV=f32,f16
// Moves this step's K and V rows of a layer from the landing rows, from max_seq on, to those from cached_len on.
#extension GL_GOOGLE_include_directive : require
#include "kv_cache.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint WORKGROUP = 32;
layout(constant_id = 1) const uint KV_HEADS = 1;
layout(constant_id = 2) const uint HEAD_DIM = 4;

layout(std430, binding = 0) buffer CacheK { KV_WORD cache_k[]; };
layout(std430, binding = 1) buffer CacheV { KV_WORD cache_v[]; };

layout(push_constant) uniform Push {
    uint cache_k_first;  // where the layer begins in its buffers, in units of 16 bytes
    uint cache_v_first;
    uint cache_rows;
    uint max_seq;
    uint cached_len;
    uint token_count;
};

void main() {
    const uint row_words = HEAD_DIM / 4;
    uint word = gl_GlobalInvocationID.x;
    uint token = gl_WorkGroupID.y;
    if (word >= KV_HEADS * row_words || token >= token_count || cached_len + token >= max_seq) return;
    if (max_seq + token >= cache_rows) return;
    uint head = word / row_words * cache_rows * row_words + word % row_words;
    uint source = head + (max_seq + token) * row_words;
    uint target = head + (cached_len + token) * row_words;
    cache_k[KV_UNIT_WORDS * cache_k_first + target] = cache_k[KV_UNIT_WORDS * cache_k_first + source];
    cache_v[KV_UNIT_WORDS * cache_v_first + target] = cache_v[KV_UNIT_WORDS * cache_v_first + source];
}
